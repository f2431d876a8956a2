"""What is said of ranks that wait in `init_process_group`, by the rule that found out why."""

from __future__ import annotations

from collections.abc import Mapping

from .stale_store import FIX

_NOT_CONNECTED = "all ranks ({ranks}) wait in init_process_group at {place}, but do not connect"
_NOT_REACHED = "{do_not_reach} init_process_group, where {waits}"
_NEEDS_ALL = "a process group is created only when every rank has called init_process_group"

WORDS: Mapping[str, tuple[str, str, str, str]] = {
    "stale-store-after-restart": (
        "connects to ranks of the last attempt",
        "after the restart {find} no other rank in init_process_group",
        "torchrun's store survives the restart and still holds the addresses of attempt {attempt}; "
        "gloo may connect to them before they are overwritten, so restarts fail at random",
        "set `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1` in the environment, with `--standalone` or "
        "`--rdzv-backend=c10d`: each attempt then creates a new store",
    ),
    "stale-store-of-destroyed-group": (
        "uses the store at {place} again",
        "{find} no other rank in init_process_group call {number}, although all ranks made that "
        "call",
        "the store still holds the addresses of the destroyed process group; the backend may "
        "connect to them before they are overwritten, so a new group fails at random",
        FIX,
    ),
    "stale-store-file": (
        "the file was there before",
        "{find} no other rank in init_process_group: the file of the store, {place}, is from an "
        "earlier run",
        "the file was last written {seconds} s before this run began and still holds the addresses "
        "of processes that are gone; a run that is killed does not delete it",
        "delete the file before each launch, or give each run a new one; or omit `init_method=` "
        "under torchrun, which keeps a store of its own",
    ),
    "no-store-at-address": (
        "rendezvous at {place}",
        _NOT_CONNECTED,
        "nobody listens at this address: under torchrun no rank opens a store, and torchrun's own "
        "store is at MASTER_ADDR and MASTER_PORT",
        "omit `init_method=`, or pass `env://`: torchrun has set the address",
    ),
    "different-addresses": (
        "each rank has its own address",
        "ranks wait in init_process_group at different addresses: {listed}",
        "each rank waits for the others at its own address; the address and port of the store must "
        "be the same on all ranks{also}",
        "under torchrun, set none of MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE: each rank has "
        "them from it; elsewhere choose the address once, before the ranks are started, and pass "
        "it to all of them (as an argument, or in the environment of the parent process)",
    ),
    "address-unreachable": (
        "rendezvous at {place}",
        _NOT_CONNECTED,
        "rank 0 cannot be reached at this address, or something else listens there",
        "check the address, that the port is free on rank 0's machine, and that the other machines "
        "can reach it",
    ),
    "device-group-not-formed": (
        "the backend connects the devices here",
        "all ranks ({ranks}) wait in init_process_group: they have met, and {backend} does not "
        "connect their devices",
        "with `device_id=` the backend is started here; its connections, or the network between "
        "the devices, do not come about",
        "run with `NCCL_DEBUG=INFO` to see where it waits; choose the network interface with "
        "`NCCL_SOCKET_IFNAME`; try `NCCL_P2P_DISABLE=1` and `NCCL_IB_DISABLE=1`",
    ),
    "world-larger-than-launched": (
        "waits for ranks that do not exist",
        "{waits} in init_process_group for {world} ranks, but only {exist}",
        "world_size is {world}, but only {launched} launched",
        "omit `rank=` and `world_size=`: torchrun sets them in the environment",
    ),
    "processes-not-seen": (
        "waits for ranks that were not seen",
        "{waits} in init_process_group for {world} ranks, but only {seen} seen",
        "world_size is {world}, but only {seen} seen: either no more were started, or the others "
        "have not called init_process_group",
        "set `world_size` to the number of processes that are started; if it is right, check what "
        "the missing ones do before init_process_group",
    ),
    "rank-exited-before": (
        "{left}",
        _NOT_REACHED,
        _NEEDS_ALL,
        "call init_process_group on every rank, idle ones too, or launch fewer ranks",
    ),
    "rank-not-arrived": (
        "not in init_process_group",
        _NOT_REACHED,
        _NEEDS_ALL,
        "check what this line does on the missing ranks; do slow work once before the launch, or "
        "after init_process_group with a longer `timeout=`",
    ),
}
"""By rule: label, summary, cause and fix. What is in braces is filled in, except in the fix."""
