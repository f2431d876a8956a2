"""DDP403: which buffers a module uses for what it returns."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ddpdoctor.probe.source.attribute_use import used, written


class Used(nn.Module):
    def forward(self, x):
        index = torch.cdist(x, self.b).argmin(1)
        found = self.b[index]
        self.b.mul_(0.9).add_(x.mean(0))
        return found


class InProperty(nn.Module):
    @property
    def scale(self):
        return 1 / self.b

    def scaled(self, y):
        return y * self.scale

    @torch.no_grad()
    def forward(self, x):
        out = {}
        out["x"] = self.scaled(x)
        self.b = 0.9 * self.b + 0.1 * x
        return out


class MadeOnce(nn.Module):
    """As codebooks are that begin with the means of the first batch."""

    made = False

    def begin(self, x):
        if self.made:
            return
        self.b.data.copy_(x[:4])
        self.made = True

    def forward(self, x):
        self.begin(x)
        if not self.made:
            self.b.copy_(x[:4])
        index = self.nearest(x)
        return F.embedding(index, self.b)

    def nearest(self, x):
        codes = self.b.t()
        return (x.pow(2).sum(1, keepdim=True) - 2 * x @ codes).min(-1).indices


class InPlace(nn.Module):
    def forward(self, *given, **more):
        x = given[0].clone()
        x.sub_(self.b)
        return x if self.training else None


class Logged(nn.Module):
    def forward(self, x):
        self.b.mul_(0.9).add_(x.mean(0))
        return x, {"usage": (self.b > 1).float().mean(), "size": x * self.b.shape[0]}


class WrittenBefore(nn.Module):
    def forward(self, x):
        self.b.copy_(x.mean(0))
        return x - self.b


class Kept(nn.Module):
    def forward(self, x):
        self.b = x.softmax(-1)
        return self.b @ x


class InEvaluation(nn.Module):
    track = True

    def forward(self, x):
        if self.training or not self.track:
            mean = x.mean(0)
            self.b.lerp_(mean, 0.1)
        else:
            mean = self.b
        y = x - (mean if self.training else self.b)
        if not self.training:
            return y - self.b
        return F.batch_norm(y, self.b, self.b, training=self.training)


@pytest.mark.parametrize("kind", [Used, InProperty, InPlace, MadeOnce])
def test_buffers_that_are_used(kind):
    code, line = used(kind, "b", {"b"})
    assert code.co_firstlineno < line


@pytest.mark.parametrize("kind", [Logged, WrittenBefore, Kept, InEvaluation, nn.BatchNorm1d])
def test_buffers_that_are_not(kind):
    assert used(kind, "b", {"b"}) is None


def test_where_a_buffer_is_written():
    places = [written(kind, "b") for kind in (Used, InProperty, WrittenBefore, InPlace)]
    assert [p and (p[0][0].co_name, p[1]) for p in places] == [
        ("forward", True),
        ("forward", True),
        ("forward", False),
        None,
    ]
