"""Trains again and again, each time with another part of the probe broken; a program, not a test.

The numbers must never change, and what failed must be on record.
"""

import os
import pathlib
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ddpdoctor.probe import activation, moments, patching, recorder, torch_private

PLACE = pathlib.Path(os.environ["PLACE"])
around, subscribe, emit = patching.around, moments.Moment.subscribe, recorder.Recorder.emit


def train():
    torch.manual_seed(0)
    dist.init_process_group(
        "gloo", init_method=f"file://{PLACE}/meeting-{os.urandom(4).hex()}", rank=0, world_size=1
    )
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    data = TensorDataset(torch.randn(24, 4))
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for (x,) in loader:
            optimizer.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            dist.all_reduce(loss.detach())
        scheduler.step()
        torch.save(model.state_dict(), PLACE / "weights.pt")
        torch.load(PLACE / "weights.pt")
    group = dist.new_group([0])
    dist.barrier(group=group)
    dist.destroy_process_group()
    return torch.cat([p.flatten() for p in model.parameters()]), torch.get_rng_state()


class Injected(Exception):
    pass


fired = []


def failing(name):
    def hook(*args, **kwargs):
        fired.append(name)
        raise Injected(name)

    return hook


def examined(name, *, break_around=None, break_subscribe=None, break_emit=False):
    """Train under a probe of which one thing is broken."""
    folder = PLACE / re_name(name)
    folder.mkdir(exist_ok=True)
    os.environ["DDPDOCTOR_DIR"] = str(folder)
    os.environ["DDPDOCTOR_PROBE"] = '{"every": 1, "budget": 100}'
    fired.clear()
    seen = []

    def watched_around(owners, attribute, *, before=None, after=None, **rest):
        for which, hook in (("before", before), ("after", after)):
            part = f"{hook.__module__}.{hook.__name__} {attribute}" if hook else ""
            if part:
                seen.append(("around", part))
            if part and part == break_around:
                before = failing(part) if which == "before" else before
                after = failing(part) if which == "after" else after
        return around(owners, attribute, before=before, after=after, **rest)

    def watched_subscribe(self, callback, **rest):
        part = f"{self.name} {callback.__module__}.{callback.__name__}"
        seen.append(("subscribe", part))
        if part == break_subscribe:
            broken = failing(part)
            broken.__module__ = callback.__module__
            callback = broken
        return subscribe(self, callback, **rest)

    def broken_emit(self, event, *, vital=False):
        if type(event).__name__ != "RankStarted":
            fired.append("emit")
            raise OSError(28, "No space left on device")
        return emit(self, event, vital=vital)

    for module in list(sys.modules.values()):
        name_of = getattr(module, "__name__", "")
        if name_of.startswith("ddpdoctor.probe") and hasattr(module, "around"):
            module.around = watched_around
    moments.Moment.subscribe = watched_subscribe
    if break_emit:
        recorder.Recorder.emit = broken_emit
    try:
        activation.torch_loaded()
        result = train()
    finally:
        activation.uninstall()
        recorder.Recorder.emit = emit
    return result, seen


def re_name(text):
    return "".join(c if c.isalnum() else "-" for c in text)


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


plain = train()
examined("import everything first")  # the modules bind `around` when they are imported
healthy, hooks = examined("healthy")
assert same(plain, healthy), "the healthy probe changes the numbers"
assert len(hooks) > 20, hooks
told = 0
chosen = list(dict.fromkeys(hooks))[:: int(os.environ.get("EVERY", "1"))]
for kind, part in chosen:
    result, _ = examined(part, **{f"break_{kind}": part})
    assert same(plain, result), f"{part} changed the numbers"
    if fired:
        text = (PLACE / re_name(part) / "rank-0.jsonl").read_text()
        assert "Injected" in text, f"{part} failed and nobody says so"
        told += 1
assert told > len(chosen) // 3, told
result, _ = examined("emit", break_emit=True)
assert same(plain, result) and fired
private = {
    n: f
    for n, f in vars(torch_private).items()
    if callable(f) and f.__module__ == torch_private.__name__
}
for name, function in private.items():

    def missing(*args, **kwargs):
        raise AttributeError("another version of torch")

    holders = [
        m
        for n, m in sys.modules.items()
        if n.startswith("ddpdoctor.probe") and getattr(m, name, None) is function
    ]
    for module in holders:
        setattr(module, name, missing)
    result, _ = examined(f"private {name}")
    for module in holders:
        setattr(module, name, function)
    assert same(plain, result), f"{name} is missing and the numbers change"
print(f"broke {told} of {len(chosen)} hooks (there are {len(set(hooks))}), {len(private)} private")
