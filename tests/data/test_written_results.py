"""metric-not-reduced: results of a shared evaluation that only some ranks write."""

import pytest
from ddpdoctor.checks.data.metric_not_reduced import MetricNotReduced
from readers import loader, prologue
from recordings import make_run, site

from ddpdoctor.events import CallBlock, CallRun, ResultWritten, Signature

WRITES, LOOP, LOADER = 30, 31, 5
LINES = [
    site(WRITES, "eval.py", 40, 'with open("answers.json", "w") as file:'),
    site(LOOP, "eval.py", 20, "for x in loader:"),
]
GATHERED = [
    Signature(at=0, id=1, op="all_gather_object"),
    CallBlock(at=0, id=1, codes=(1, 0)),
    CallRun(at=0, group=0, first=0, block=1, repeat=1, step=0, every=0),
]


def judged(writing, *, shared=True, more=(), of=LOADER, path="answers.json", late=True):
    """Two ranks that evaluate, of which some write the results."""

    def events(rank):
        share = {"replicas": 2, "sampler_rank": rank, "distributed": True} if shared else {}
        read = [rank, 2 + rank] if shared else [0, 1, 2, 3]
        held_out = loader(LOADER, [read], trains=False, loop_site=LOOP, length=4, **share)
        result = ResultWritten(at=0, name="rows", loader=of, step=0, site=WRITES, path=path)
        mine = [result] if rank in writing else []
        read = [*held_out, *mine] if late else [*held_out[:-1], *mine, held_out[-1]]
        return [*prologue(2), *LINES, *read, *more]

    found = MetricNotReduced().examine(make_run({n: events(n) for n in range(2)}))
    return [f for f in found if f.rule == "written-by-some-ranks"]


def test_one_rank_writes_the_results_of_its_share():
    (finding,) = judged([0])
    assert (finding.ranks, finding.location.line) == ((0,), 40)
    assert "2 of 4 samples" in finding.summary and "`rows`" in finding.cause
    assert finding.related[0].location.line == 20


@pytest.mark.parametrize(
    "case",
    [
        {"writing": [0, 1]},
        {"writing": []},
        {"writing": [0], "shared": False},
        {"writing": [0], "more": GATHERED},
        {"writing": [0], "of": LOADER + 1},
        {"writing": [0], "path": "samples.PNG"},
        {"writing": [0], "late": False},
    ],
    ids=[
        "each rank",
        "nobody",
        "all the data",
        "gathered",
        "of another loader",
        "a picture",
        "within the loop",
    ],
)
def test_results_that_are_complete(case):
    assert not judged(**case)
