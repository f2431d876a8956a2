"""torch's own words on an unfinished reduction, which name the parameters of a late step."""

from ddpdoctor.probe.recording.torch_compat import without_gradient

ENDING = """
Parameters which did not receive grad for rank 1: b.bias, b.weight
Parameter indices which did not receive grad for rank 1: 2 3"""


def test_positions_are_read_from_the_error():
    assert without_gradient("Expected to have finished reduction" + ENDING) == [2, 3]


def test_with_more_text_after_them():
    text = ENDING + "\n In addition, you can set the environment variable TORCH_DISTRIBUTED_DEBUG 1"
    assert without_gradient(text) == [2, 3]


def test_another_error():
    assert without_gradient("Connection closed by peer: rank 1: 2 3") == []
