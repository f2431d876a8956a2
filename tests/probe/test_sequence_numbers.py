"""How many collectives a group has issued, whatever its backends."""

from __future__ import annotations

import pytest

from ddpdoctor.probe.recording.torch_compat import sequence_number


class Backend:
    def __init__(self, count: int) -> None:
        self.count = count

    def _get_sequence_number_for_group(self) -> int:
        return self.count


class Group:
    """Answers for the backend of its first device, as torch does."""

    def __init__(self, **backends: Backend | None) -> None:
        self.backends = backends
        self._device_types = list(backends)

    def _get_backend(self, device: str) -> Backend:
        found = self.backends[device]
        if found is None:
            raise RuntimeError(f"no backend for {device}")
        return found

    def _get_sequence_number_for_group(self) -> int:
        return self._get_backend(self._device_types[0]).count


def test_a_model_on_the_cpu_beside_nccl_is_seen_to_communicate() -> None:
    """Its collectives move the number of gloo only, and torch answers for NCCL."""
    nccl, gloo = Backend(0), Backend(3)
    group = Group(cuda=nccl, cpu=gloo)
    before = sequence_number(group)
    gloo.count += 1
    assert sequence_number(group) == before + 1
    nccl.count += 1
    assert sequence_number(group) == before + 2


@pytest.mark.parametrize("more", [{}, {"cuda": None}])
def test_one_backend_is_asked_itself(more: dict[str, Backend | None]) -> None:
    assert sequence_number(Group(cpu=Backend(7), **more)) == 7
    shared = Backend(5)
    assert sequence_number(Group(cpu=shared, cuda=shared)) == 5


def test_what_is_no_group_has_no_number() -> None:
    assert sequence_number(None) == -1
