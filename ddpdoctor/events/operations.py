"""What kind of operation a collective or point-to-point call is, by its name in the records.

One table for the probe and for the checks. A new collective is a row here, and one in
`probe/collectives/collectives.py` that says how its arguments are read.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Operation:
    """What a call does with values.

    Attributes:
        carries: the rank passes tensors of its own.
        reduces: the ranks' tensors are summed (averaged, ...), and several ranks get the result.
        gathers: the ranks' tensors arrive unchanged.
        spreads: one rank's values go to other ranks.
        several: it takes several tensors at once; their size is recorded as -1.
        objects: it takes Python objects, not tensors.
        sends, receives: it is point-to-point.
        meets: it only makes ranks wait for each other.
    """

    carries: bool = False
    reduces: bool = False
    gathers: bool = False
    spreads: bool = False
    several: bool = False
    objects: bool = False
    sends: bool = False
    receives: bool = False
    meets: bool = False


OPERATIONS = {
    "all_reduce": Operation(carries=True, reduces=True),
    "all_reduce_coalesced": Operation(carries=True, reduces=True, several=True),
    "reduce": Operation(carries=True),
    "reduce_scatter": Operation(carries=True, reduces=True),
    "reduce_scatter_tensor": Operation(carries=True, reduces=True),
    "broadcast": Operation(carries=True, spreads=True),
    "scatter": Operation(spreads=True),
    "all_gather": Operation(carries=True, gathers=True),
    "all_gather_coalesced": Operation(carries=True, gathers=True, several=True),
    "all_gather_into_tensor": Operation(carries=True, gathers=True),
    "gather": Operation(carries=True, gathers=True),
    "all_to_all": Operation(carries=True),
    "all_to_all_single": Operation(carries=True),
    "all_gather_object": Operation(gathers=True, objects=True),
    "gather_object": Operation(gathers=True, objects=True),
    "broadcast_object_list": Operation(spreads=True, objects=True),
    "scatter_object_list": Operation(spreads=True, objects=True),
    "send": Operation(sends=True),
    "isend": Operation(sends=True),
    "send_object_list": Operation(sends=True, objects=True),
    "recv": Operation(receives=True, spreads=True),
    "irecv": Operation(receives=True, spreads=True),
    "recv_object_list": Operation(receives=True, spreads=True, objects=True),
    "barrier": Operation(meets=True),
    "monitored_barrier": Operation(meets=True),
    "new_group": Operation(meets=True),
}

_OTHER = Operation()


def operation(name: str) -> Operation:
    """The row of an operation; one without any property if it is not in the table."""
    return OPERATIONS.get(name, _OTHER)
