"""Which `if` of a forward decides whether a submodule is used, from its text alone."""

import inspect

import pytest

from ddpdoctor.probe.sources import branch_around


class Guarded:
    def forward(self, x):
        if x is None:  # decides
            return x
        return self.aux(x)


class InTraining:
    def forward(self, x):
        if not self.training:
            return x
        return self.aux(x)


class Skipping:
    def forward(self, samples):
        if not self.training:
            return samples
        for x in samples:
            if x is None:
                continue
        for x in samples:
            if not len(x):  # decides
                continue
            self.aux(x)
        return samples


class Inside:
    def forward(self, x):
        if x is None:
            return x
        if self.training and len(x) > 2:  # decides
            x = self.aux(x)
        return x


class Always:
    def forward(self, samples):
        for x in samples:
            if x is None:
                break
        return self.aux(samples)


@pytest.mark.parametrize("kind", [Guarded, InTraining, Skipping, Inside, Always])
def test_the_line_that_decides(kind: type) -> None:
    found = branch_around(kind(), "aux")
    lines, first = inspect.getsourcelines(kind)
    decides = [n for n, line in enumerate(lines, first) if "# decides" in line]
    assert ([found[1]] if found is not None else []) == decides
