"""Trains again and again, each time with another function of the probe broken; a program, no test.

Every function of the probe that a healthy training calls raises in turn, every time that it is
called: the numbers must never change, nothing may get out, and what failed must be on record.
With LIGHT in the environment the training has light steps, and what works in them is broken;
with ONLY=hooks.Hook.update,... only these functions are.
"""

import contextlib
import os
import pathlib
import random
import sys
import types
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ddpdoctor.probe.bootstrap import activation
from ddpdoctor.probe.recording import recorder
from ddpdoctor.probe.training import light_steps, limits, steady_state
from ddpdoctor.probe.watchers.losses import loss_scaling
from ddpdoctor.probe.watchers.timing import idle_time
from ddpdoctor.storage import call_ring, run_folder

PLACE = pathlib.Path(os.environ["PLACE"])
LIGHT = "LIGHT" in os.environ
IN_LIGHT = (
    "steady_state.Plan", "light_run.", "accumulate_grad.LastGradient", "timed_ring.", "group_log.",
    "call_log.CallLog.passed", "call_ring.RingWriter", "loaders.Loaders",
    "sync_waits.SyncWaits._light", "optimizers.Optimizers", "backwards.Backwards",
    "forwards.Forwards",
)  # fmt: skip
"""How the names begin of what works in light steps."""

GUARDS = {
    "accumulate_grad.LastGradient._accumulated", "light_run.LightRun.catch_up",
    "loaders.Loaders._begins_fast", "recorder.Recorder.catch_up", "steady_state.Plan.loaded",
    "activation.leave", "activation.torch_loaded", "activation.uninstall",
    "collectives.mark", "collectives._returned", "collectives.Collectives._waited_for",
    "loaders.Loaders._batch_delivered", "loaders.Loaders._dropped",
    "iteration.Iteration.generators",
    "loaders.Loaders._loading_failed", "loaders.Loaders._next_batch",
    "frames.disguise", "frames.unframe", "import_hooks.Finder.find_spec",
    "import_hooks._Execution.__call__",
    "module_origins.ModuleOrigins._missed", "module_origins.ModuleOrigins._registered",
    "hooks.Hook.fire",
    "optimizers.Optimizers._post_hook", "optimizers.Optimizers._pre_hook",
    "patching.around", "patching.on_restore", "patching.refused",
    "patching.replace", "patching.replace_copies", "patching.restore", "exits.uninstall",
    "recorder.Recorder.disabled", "recorder.Recorder.trouble", "recorder.write_probe_error",
    "optimizers.Optimizers._last_pre_hook",
    "recorder.guarded", "recorder.current_recorder", "recorder.run_hook", "recorder.set_recorder",
    "recorder.shielded", "stack_file.drop",
    "sync_waits.SyncWaits._backward_runs", "sync_waits.SyncWaits._gradients_computed",
    "torch_compat.resume_compiler",
}  # fmt: skip
"""What catches the failures of all others: nothing stands between these and the user."""


class Injected(Exception):
    pass


def train():
    torch.manual_seed(0)
    random.seed(0)
    dist.init_process_group(
        "gloo", init_method=f"file://{PLACE}/meeting-{os.urandom(4).hex()}", rank=0, world_size=1
    )
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    model = DistributedDataParallel(net, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scaler = torch.amp.GradScaler("cpu")
    data = TensorDataset(torch.randn(24, 4), torch.arange(24))
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for number, (x, _) in enumerate(loader):
            optimizer.zero_grad()
            with model.no_sync():
                model(x).square().mean().backward()
            loss = model(x).square().sum()
            if number % 2:
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
            loss.item()
            total = loss.detach().clone()
            dist.all_reduce(total)
            dist.all_reduce(total, async_op=True).wait()
        scheduler.step()
        torch.save(model.state_dict(), PLACE / "weights.pt")
        model.load_state_dict(torch.load(PLACE / "weights.pt"))
        optimizer.load_state_dict(optimizer.state_dict())
        model.eval()
        with torch.no_grad():
            model(x)
        model.train()
    for _ in range(2 * limits.ALIKE):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    group = dist.new_group([0])
    told = [None]
    dist.all_gather_object(told, 7, group=group)
    dist.broadcast(total, src=0)
    dist.barrier(group=group)
    with contextlib.suppress(TypeError):
        model(None)
    dist.destroy_process_group()
    with contextlib.suppress(SystemExit):
        sys.exit(3)
    parameters = torch.cat([p.flatten() for p in model.parameters()])
    return parameters, torch.get_rng_state(), torch.tensor(random.random())


def train_lightly():
    """A loop that is alike in every step, but for one collective."""
    torch.manual_seed(0)
    random.seed(0)
    dist.init_process_group(
        "gloo", init_method=f"file://{PLACE}/meeting-{os.urandom(4).hex()}", rank=0, world_size=1
    )
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(72, 4), torch.arange(72))
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
    for epoch in range(16):
        for number, (x, _) in enumerate(loader):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            if (epoch, number) == (14, 5):
                dist.barrier()
            optimizer.step()
            plan = steady_state.steady_state.expected
            lights.append(plan is not None and plan.last is not None)
    dist.destroy_process_group()
    parameters = torch.cat([p.flatten() for p in model.parameters()])
    return parameters, torch.get_rng_state(), torch.tensor(random.random())


lights = []


def examined(name, trace=None):
    """Train under the probe, in place as the shim does it; what is on record of it."""
    folder = PLACE / f"{name} {os.urandom(4).hex()}"
    folder.mkdir()
    os.environ["DDPDOCTOR_DIR"] = str(folder)
    os.environ["DDPDOCTOR_PROBE"] = '{"budget": 100}' if LIGHT else '{"every": 1, "budget": 100}'
    sys.setprofile(trace)
    try:
        try:
            activation.torch_loaded()
        except Exception as error:
            recorder.write_probe_error(error)
        result = training()
        try:
            activation.leave(None, None)
        except Exception as error:
            recorder.write_probe_error(error)
    finally:
        sys.setprofile(None)
        activation.uninstall()
    files = [*folder.glob("*.jsonl"), *folder.glob("probe-errors-*")]
    return result, "".join(path.read_text() for path in files)


def functions():
    """Every function of the probe, by name; for what is made inside of others see `closures`."""
    found = {}
    modules = [m for n, m in sorted(sys.modules.items()) if n.startswith("ddpdoctor.probe.")]
    for module in (*modules, call_ring, run_folder):
        short = module.__name__.rpartition(".")[2]
        for name, value in vars(module).items():
            if getattr(value, "__module__", "") != module.__name__:
                continue
            held = {f".{n}": v for n, v in vars(value).items()} if isinstance(value, type) else {}
            for inner, function in (held or {"": value}).items():
                function = getattr(function, "__func__", None) or getattr(
                    function, "fget", function
                )
                if isinstance(function, types.FunctionType):
                    found[f"{short}.{name}{inner}"] = function
    assert not GUARDS - found.keys(), (
        f"{GUARDS - found.keys()} are no functions of the probe any more"
    )
    return {n: f for n, f in found.items() if not f.__code__.co_freevars and n not in GUARDS}


def closures():
    """Code of functions made inside of others, by name; without the wrappers, which users call."""
    found = {}
    for code in called:
        name = getattr(code, "co_qualname", "")  # Python 3.11
        ours = "/ddpdoctor/" in code.co_filename and "importlib" not in code.co_filename
        guard = code.co_name in ("exit", "call") or "FastPath." in name
        if "<locals>" in name and ours and not guard:
            found[f"{pathlib.Path(code.co_filename).stem}.{name}"] = code
    return dict(sorted(found.items()))


def broken(function):
    """Train with a function that always raises."""

    def stub(*args, **kwargs):
        __injected__()  # noqa: F821

    code = function.__code__
    function.__globals__["__injected__"] = inject
    function.__code__ = stub.__code__
    try:
        return examined("broken")
    finally:
        function.__code__ = code
        del function.__globals__["__injected__"]


def cut_short(code):
    """The same for a function made inside of another, the first time that it is called."""

    def tracer(frame, event, argument):
        if frame.f_code is code and not fired:
            inject()

    sys.settrace(tracer)
    try:
        return examined("broken")
    finally:
        sys.settrace(None)


fired = []


def inject():
    fired.append(1)
    raise Injected("injected")


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def note(frame, event, argument):
    if event == "call":
        called.add(frame.f_code)


warnings.simplefilter("ignore")
torch.set_num_threads(1)
steady_state.FAST_PATH_AFTER = 0
training = train_lightly if LIGHT else train
if LIGHT:
    idle_time.SHORTEST_S, loss_scaling.LOSSES_ENOUGH = 1e9, 2
    light_steps.LightSteps.after = lambda *of: 20 * (not light_steps.watched())
called = set()
plain = training()
examined("import everything first")
healthy, record = examined("healthy", note)
assert same(plain, healthy), "the healthy probe changes the numbers"
assert "probe-trouble" not in record, record
used = {n: f for n, f in functions().items() if f.__code__ in called} | closures()
assert len(used) > 400, len(used)
if LIGHT:
    assert sum(lights) > 50, "there were hardly any light steps"
    used = {n: f for n, f in used.items() if n.startswith(IN_LIGHT)}
    assert "light_run.LightRun._settle" in used
assert "forwards.Forwards._ends_fast" in used
chosen = list(used)[:: int(os.environ.get("EVERY", "1"))]
if "ONLY" in os.environ:
    chosen = os.environ["ONLY"].split(",")
wrong = []
for name in chosen:
    fired.clear()
    part = used[name]
    try:
        result, record = (broken if isinstance(part, types.FunctionType) else cut_short)(part)
    except Injected:
        wrong.append(f"{name}: its failure got out")
        if dist.is_initialized():
            dist.destroy_process_group()
        continue
    if not same(plain, result):
        wrong.append(f"{name}: its failure changes the numbers")
    if fired and "Injected" not in record:
        wrong.append(f"{name} failed and nobody says so")
print("\n".join(wrong))
print(f"broke {len(chosen)} of {len(used)} functions, {len(wrong)} of them badly")
sys.exit(bool(wrong))
