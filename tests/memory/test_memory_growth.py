"""DDP206 over literal events, and the line that makes memory grow."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ddpdoctor.checks.memory.memory_growth import MemoryGrowth
from recordings import START, make_run, site, steps

from ddpdoctor.events import EpochEnded, Event, LoaderSeen, MemoryHeld, MemorySample
from ddpdoctor.probe.recording import limits, names_in_frames
from ddpdoctor.report.findings import Finding, Severity

MB = 1 << 20


def samples(
    levels: list[float], *, device: list[float] | None = None, every: int = 10
) -> list[Event]:
    """One sample every `every` steps; levels in megabytes."""
    return [
        MemorySample(
            at=START + 1 + n,
            step=n * every,
            rss_bytes=int(level * MB),
            peak_rss_bytes=int(level * MB),
            device_bytes=int(device[n] * MB) if device else 0,
        )
        for n, level in enumerate(levels)
    ]


def held(graphs: bool = True, entry_bytes: int = 0, *, grown: int = 50, steps: int = 50) -> Event:
    return MemoryHeld(at=START + 20, name="losses", kind="list", length=200, grown=grown,
                      steps=steps, step=200, graphs=graphs, site=2,
                      entry_bytes=entry_bytes)  # fmt: skip


def epoch(number: int, at: float) -> Event:
    return EpochEnded(
        at=START + at, loader=0, epoch=number, batches=9, samples=9, backwards=9, exhausted=True
    )


LOADER = LoaderSeen(
    at=START, loader=0, site=-1, loop_site=-1, dataset="D", length=90, sampler="RandomSampler"
)


def found(*events: Event) -> list[Finding]:
    lines = [
        site(1, "train.py", 30, "optimizer.step()"),
        site(2, "train.py", 33, "losses.append(l)"),
    ]
    run = make_run({0: [*lines, *steps(3, site=1), *events], 1: []})
    return list(MemoryGrowth().examine(run))


def test_grows_to_the_end() -> None:
    (finding,) = found(*samples([300 + 4 * n for n in range(30)], every=30))
    assert finding.severity is Severity.WARNING
    assert finding.ranks == (0,)
    assert finding.location is not None and finding.location.line == 30
    assert finding.steps is not None and finding.steps.last == 869


def test_its_figures_can_be_checked_against_each_other() -> None:
    # Samples that get rarer, so that growth by samples is not growth by steps.
    told = [
        MemorySample(at=START + 1 + n, step=4 * n * n, rss_bytes=(300 + 5 * n) * MB,
                     peak_rss_bytes=0)
        for n in range(30)
    ]  # fmt: skip
    other = samples([300 + 4 * n for n in range(30)], every=100)
    run = make_run({0: [*steps(3), *told], 1: [*steps(3), *other]})
    (finding,) = MemoryGrowth().examine(run)
    names = ("growth per step in bytes", "measured from step", "measured to step")
    each, begin, end = (cast("int", finding.evidence[name]) for name in names)
    total = round(each * (end - begin) / MB)
    assert {"rank": 0, "growth": f"{total} MB"} in finding.evidence["ranks"]  # type: ignore[operator]
    assert finding.steps is not None
    assert finding.steps.last == 4 * 29 * 29 - 1
    assert finding.steps.count == finding.steps.last - finding.steps.first + 1
    assert finding.steps.compared == finding.steps.count


def test_growth_that_begins_late() -> None:
    flat = [336 + 0.1 * n for n in range(20)]
    growing = [338 + 5 * n for n in range(20)]
    (finding,) = found(*samples([*flat, *growing]), held())
    assert finding.steps is not None
    assert finding.steps.compared == finding.steps.count, "what was before is not known"
    assert 170 <= finding.steps.first <= 230 and finding.steps.last == 389
    assert finding.steps.count == 390 - finding.steps.first
    each = cast("int", finding.evidence["growth per step in bytes"])
    assert each / MB == pytest.approx(0.5, rel=0.1)


def test_a_little_is_enough_where_the_holder_is_known() -> None:
    levels = [300 + 0.2 * n for n in range(30)]
    assert not found(*samples(levels))
    (finding,) = found(*samples(levels), held())
    assert finding.subjects == ("losses",)
    assert finding.location is not None and finding.location.line == 33


def test_ranks_that_keep_as_much_are_told_whatever_they_give_back() -> None:
    growing = samples([300 + 0.2 * n for n in range(30)])
    flat = samples([300 - 0.1 * n for n in range(30)])
    lines = [site(1, "train.py", 4, "optimizer.step()"), site(2, "train.py", 9, "losses.append(x)")]
    later, faster = held(grown=51, steps=51), held(grown=80)
    for more, ranks in (
        ([held()], (0, 1)), ([later], (0, 1)), ([faster], (1,)), ([], (1,)),
        ([held(graphs=False)], (1,)),
    ):  # fmt: skip
        events = {0: [*lines, *flat, *more], 1: [*lines, *growing, held()]}
        run = make_run({n: [*mine, *steps(300, site=1)] for n, mine in events.items()})
        (finding,) = MemoryGrowth().examine(run)
        assert finding.ranks == ranks


def test_on_the_device() -> None:
    (finding,) = found(*samples([300.0] * 30, device=[100 + n for n in range(30)]))
    assert finding.evidence["where"] == "device"


def test_a_cache_that_levels_off() -> None:
    assert not found(*samples([400 - 100 * 0.8**n for n in range(30)]))


def test_warm_up_only() -> None:
    assert not found(*samples([300 + 30 * min(n, 5) for n in range(30)]))


def test_up_and_down() -> None:
    assert not found(*samples([300 + 40 * (n % 7) + n / 10 for n in range(40)]))


def test_noise() -> None:
    assert not found(*samples([300 + (n * 37 % 11) / 4 for n in range(40)]))


def test_a_data_set_that_caches_in_its_first_epoch() -> None:
    growing = [300 + 4 * n for n in range(30)]
    assert not found(LOADER, *samples(growing))
    level = [300 + 8 * min(n, 15) for n in range(40)]
    assert not found(LOADER, *samples(level), epoch(0, 16), epoch(1, 32))


def test_growth_beyond_the_first_epoch() -> None:
    growing = [300 + 4 * n for n in range(40)]
    ends = (epoch(0, 10), epoch(1, 20), epoch(2, 30))
    assert found(LOADER, *samples(growing, every=30), *ends)


def test_a_short_rise_that_nothing_accounts_for() -> None:
    growing = samples([300 + 4 * n for n in range(30)])
    assert not found(*growing)
    assert not found(*growing, held(graphs=False, entry_bytes=4))
    assert found(*growing, held(graphs=False, entry_bytes=400 << 10))


def test_graphs_that_are_kept_in_the_first_epoch() -> None:
    assert found(LOADER, *samples([300 + 4 * n for n in range(30)]), held())
    assert not found(LOADER, *samples([300 + 4 * n for n in range(30)]), held(graphs=False))


def test_too_short() -> None:
    run = make_run({0: samples([300.0] * 5)})
    assert MemoryGrowth().unobserved(run)


class Keeper:
    def __init__(self) -> None:
        self.kept: list[object] = []

    def keep(self, thing: object) -> None:
        self.kept.append(thing)


@pytest.mark.parametrize("everywhere", [True, False])
def test_what_grows_is_named_with_its_line(everywhere: bool) -> None:
    torch = pytest.importorskip("torch")
    from ddpdoctor.probe.recording.code_locations import Sites
    from ddpdoctor.probe.watchers.memory import memory_holders

    sites = Sites(lambda event: None)

    def census() -> dict[int, memory_holders.TensorContainer]:
        return memory_holders.census(
            None if everywhere else memory_holders.named_objects(sys._getframe(1), sites)
        )

    keeper = Keeper()
    weight = torch.ones(3, requires_grad=True)
    for _ in range(20):
        keeper.keep((weight * 2).sum())
    before = census()
    for _ in range(20):
        keeper.keep((weight * 2).sum())
    after = census()
    (key,) = [k for k in after if k in before and after[k].length - before[k].length == 20]
    assert after[key].graphs
    one = names_in_frames.name_of(key, sys._getframe(), sites)
    assert one is not None
    assert one.name == "keeper.kept"
    assert adds(one) == "self.kept.append(thing)"


@pytest.mark.parametrize("deep", [False, True])
def test_what_grows_in_a_module_is_at_hand_through_its_wrapper(deep: bool) -> None:
    torch = pytest.importorskip("torch")
    from ddpdoctor.probe.recording.code_locations import Sites
    from ddpdoctor.probe.watchers.memory import memory_holders

    class Task(torch.nn.Module):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.outputs: list[object] = []

        def forward(self, x: Any) -> Any:
            self.outputs.append(x.detach())
            return x

    task = Task()
    layers = torch.nn.Sequential(torch.nn.Linear(1, 1), task) if deep else task
    layers.register_module("none", None)
    trainer = Result(torch.nn.DataParallel(layers), None)
    for n in range(20):
        task(torch.ones(n))
    key = id(task.outputs)
    del task, layers
    sites = Sites(lambda event: None)
    assert key in memory_holders.census(memory_holders.named_objects(sys._getframe(), sites))
    one = names_in_frames.name_of(key, sys._getframe(), sites, limits.DEEPEST_NAME)
    assert one is not None
    assert one.name == f"trainer.first.module{'[1]' if deep else ''}.outputs"
    assert one.owner is Task and trainer.disable is None
    assert adds(one) == "self.outputs.append(x.detach())"


class Sums:
    def __init__(self) -> None:
        self.kinds: dict[str, list[object]] = {}

    def see(self, **values: object) -> None:
        for kind, value in values.items():
            self.kinds[kind] = self.kinds.get(kind, [])
            self.kinds[kind].append(value)


def test_what_grows_under_a_key_is_added_to_under_any() -> None:
    torch = pytest.importorskip("torch")
    from ddpdoctor.probe.recording.code_locations import Sites
    from ddpdoctor.probe.watchers.memory import memory_holders

    sums, mean = Sums(), 0.0
    for _ in range(20):
        sums.see(mean=torch.zeros(3), other=1)
        mean += 0.5
    sites = Sites(lambda event: None)
    (key,) = memory_holders.census([sums.kinds["mean"]])
    one = names_in_frames.name_of(key, sys._getframe(), sites, limits.DEEPEST_NAME)
    assert one is not None and one.name == "sums.kinds['mean']"
    assert adds(one) == "self.kinds[kind].append(value)"
    *_, function = memory_holders.adding_line(one, sites)
    assert function == "see"


def adds(one: Any) -> str:
    """The line that adds to it."""
    from ddpdoctor.probe.recording.code_locations import Sites
    from ddpdoctor.probe.watchers.memory import memory_holders

    file, line, _ = memory_holders.adding_line(one, Sites(lambda event: None))
    return linecache.getline(file, line).strip()


class Result:
    def __init__(self, *parts: object) -> None:
        self.first, self.disable = parts


@pytest.mark.parametrize("entry", [
    pytest.param(lambda *parts: parts, id="tuple"),
    pytest.param(lambda *parts: dict(enumerate(parts)), id="dict"),
    pytest.param(lambda loss, rest: (loss, {"rest": rest}), id="nested"),
    pytest.param(Result, id="object"),
])  # fmt: skip
def test_an_entry_is_as_large_as_all_of_its_own_tensors(entry: Callable[..., object]) -> None:
    torch = pytest.importorskip("torch")
    from ddpdoctor.probe.watchers.memory import memory_holders

    kept = [entry(torch.zeros(()), torch.zeros(1000)) for _ in range(16)]
    (held,) = memory_holders.census([kept]).values()
    assert held.entry_bytes == 4004
    everyones = torch.zeros(1000)
    (held,) = memory_holders.census([[(torch.zeros(()), everyones) for _ in range(16)]]).values()
    assert held.entry_bytes == 4


class Hostile:
    @property
    def __dict__(self) -> dict[str, object]:  # type: ignore[override]
        raise AssertionError("code of the user's was run")


class HostileList(list[object]):
    def __len__(self) -> int:
        raise AssertionError("code of the user's was run")


def test_objects_are_looked_at_without_running_their_code() -> None:
    pytest.importorskip("torch")
    from ddpdoctor.probe.watchers.memory import memory_holders

    entries: list[object] = [Hostile(), HostileList(), Hostile, Severity.ERROR]
    assert memory_holders.census([[entry] * 16 for entry in entries]) == {}


class Meter:
    def __init__(self) -> None:
        self.sum: Any = 0.0
        self.count = 0

    def update(self, value: Any) -> None:
        self.sum += value
        self.count += 1


class Logger:
    def __init__(self) -> None:
        self.meters = {"loss": Meter(), "accuracy": Meter()}


def long_chain() -> tuple[Any, int]:
    from ddpdoctor.probe.recording.code_locations import Sites
    from ddpdoctor.probe.watchers.memory import memory_holders

    return memory_holders.long_chain(sys._getframe(1), Sites(lambda event: None))


def test_a_sum_that_drags_its_graphs_along() -> None:
    torch = pytest.importorskip("torch")
    total = torch.zeros(())
    weight = torch.ones(3, requires_grad=True)
    for _ in range(60):
        total = total + (weight * 2).sum()
    one, length = long_chain()
    assert one.name == "total" and length >= 50
    assert adds(one).startswith("total = total")


def test_a_sum_that_an_object_keeps() -> None:
    torch = pytest.importorskip("torch")
    weight = torch.ones(3, requires_grad=True)
    logger = Logger()
    for _ in range(60):
        logger.meters["accuracy"].update((weight * 2).sum().detach())
    assert long_chain() == (None, 0)
    for _ in range(60):
        logger.meters["loss"].update((weight * 2).sum())
    one, length = long_chain()
    assert one.name == "logger.meters['loss'].sum" and length >= 50
    assert adds(one) == "self.sum += value"


class SumsInList:
    def __init__(self, losses: int) -> None:
        self.sums = [0] * losses

    def update(self, values: list[Any]) -> None:
        for n, value in enumerate(values):
            self.sums[n] = self.sums[n] + value


@pytest.mark.parametrize(("losses", "told"), [(2, True), (1000, False)])
def test_a_sum_in_a_list(losses: int, told: bool) -> None:
    torch = pytest.importorskip("torch")
    weight = torch.ones(3, requires_grad=True)
    meter = SumsInList(losses)
    for _ in range(60):
        meter.update([0, (weight * 2).sum()])
    one, _ = long_chain()
    assert (one.name if one else None) == ("meter.sums[1]" if told else None)
    assert not told or adds(one) == "self.sums[n] = self.sums[n] + value"


def gains(*grown: int) -> list[Event]:
    """One container of half-megabyte tensors, looked at every 50 steps."""
    return [
        MemoryHeld(at=START + 5 * n, name="", kind="dict", length=1000, grown=entries, steps=50,
                   step=50 * n, graphs=False, site=2, entry_bytes=MB // 2)
        for n, entries in enumerate(grown, 1)
    ]  # fmt: skip


def test_a_cache_that_fills_more_and_more_slowly() -> None:
    levels = [300 + 4 * n for n in range(30)]
    assert found(*gains(50, 48, 52), *samples(levels))
    assert not found(*gains(50, 28, 20), *samples(levels))


@pytest.mark.parametrize(("each", "gained", "told"), [
    ((1, 1), 20, True),
    ((1, 3), 20, True),  # three forwards a step
    ((0, 1), 20, True),  # evaluation
    ((1, 3), 4, False),  # with some of the steps only
    ((0, 1), 4, False),
])  # fmt: skip
def test_what_grows_with_the_steps_whatever_forwards_each_takes(
    monkeypatch: pytest.MonkeyPatch, each: tuple[int, int], gained: int, told: bool
) -> None:
    pytest.importorskip("torch")
    from ddpdoctor.probe.training.forwards import Forwards
    from ddpdoctor.probe.watchers.memory import memory, memory_holders
    from ddpdoctor.probe.watchers.memory.memory import Memory

    found: list[tuple[int, int]] = []
    steps, forwards = (50 * n for n in each)
    kept = [0]
    monkeypatch.setattr(Memory, "current", Memory())
    monkeypatch.setattr(
        memory_holders,
        "census",
        lambda *_: {1: memory_holders.TensorContainer(kept[0], True, "list")},
    )
    monkeypatch.setattr(memory.names_in_frames, "name_of", lambda *_: None)
    monkeypatch.setattr(Memory.current, "_emit", lambda *told: found.append(told[3:]))
    for _ in range(2):
        recorder: Any = SimpleNamespace(step=steps, sites=None)
        monkeypatch.setattr(Forwards.current, "count", forwards)
        Memory.current._look_for_holder(recorder, everywhere=True)
        steps, forwards, kept[0] = steps + 20 * each[0], forwards + 20 * each[1], kept[0] + gained
    assert found == ([(gained, 20)] if told else [])
