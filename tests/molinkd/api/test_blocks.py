"""What an answer's parts become: blocks, one after the other, however the answer was cut."""

from hypothesis import given
from hypothesis import strategies as st

from molink.errors import ContextTooLong, RequestError
from molink.text.calls.base import CallArguments, CallBegin, CallEnd, Part, Text, Thought
from molinkd.api.adapting import renamed
from molinkd.api.blocks import BlockBegun, BlockEnded, BlockGrown, BlockReader, Step, blocks_of
from molinkd.api.choice import TextPiece, TokenLogprob

CALL: list[Part] = [CallBegin(0, "f"), CallArguments(0, '{"a'), CallArguments(0, '": 1}')]
RUNS = st.lists(
    st.sampled_from(
        [[Text("a")], [Text("b"), Text("c")], [Thought("t")], CALL, [*CALL, CallEnd(0)]]
    )
)


def steps_of(pieces: list[TextPiece]) -> tuple[list[Step], BlockReader]:
    reader = BlockReader()
    steps = [step for piece in pieces for step in reader.push(piece)]
    return steps + reader.finish(), reader


@given(RUNS, st.integers(1, 4))
def test_cuts_change_nothing(runs: list[list[Part]], size: int) -> None:
    parts = [part for run in runs for part in run]
    pieces = [TextPiece("", parts=parts[at : at + size]) for at in range(0, len(parts), size)]
    steps, reader = steps_of(pieces)
    blocks = reader.blocks
    assert blocks == blocks_of([TextPiece("", parts=parts)])
    assert blocks
    assert [block.index for block in blocks] == list(range(len(blocks)))
    # Each begins when the one before has ended, and what it grows by is what it is.
    ends = [step for step in steps if not isinstance(step, BlockGrown)]
    assert ends == [step for block in blocks for step in (BlockBegun(block), BlockEnded(block))]
    for block in blocks:
        grown = [
            step.text for step in steps if isinstance(step, BlockGrown) and step.block == block
        ]
        assert "".join(grown) == block.text
        assert (block.arguments is not None) == (block.kind == "call")
    said = [part.text for part in parts if not isinstance(part, CallBegin | CallEnd)]
    assert "".join(block.text for block in blocks) == "".join(said)


def test_logprobs_stay_with_texts() -> None:
    first, second, third = (TokenLogprob(token, -0.5, (), 0) for token in range(3))
    pieces = [
        TextPiece("", [first]),
        TextPiece("x", [second]),
        TextPiece("", [third], parts=CALL),
    ]
    text, call = steps_of(pieces)[1].blocks
    assert (text.text, text.logprobs) == ("x", [first, second])
    assert (call.name, call.logprobs) == ("f", [])


def test_arguments_that_are_no_object() -> None:
    for text in ("", "[]", '{"a": 1', "{} {}", "[" * 100_000, '"x"', '{"a": NaN}'):
        (call,) = blocks_of([TextPiece("", parts=[CallBegin(0, "f"), CallArguments(0, text)])])
        assert call.arguments is None
        assert call.as_text() == f"f({text})"


def test_fields_are_called_as_their_protocol_does() -> None:
    names = {
        "messages": "input",
        "tools[].function": "tools[]",
        "tools[].function.parameters": "tools[].schema",
    }
    for own, other in (
        ("messages", "input"),
        ("messages[3].content", "input[3].content"),
        ("tools[12].function.name", "tools[12].name"),
        ("tools[0].function.parameters.properties.a", "tools[0].schema.properties.a"),
        ("tools", "tools"),
        ("messages_more", "messages_more"),
    ):
        error = renamed(RequestError(f"`{own}` and `n`: no", own), names)
        assert (str(error), error.param) == (f"`{other}` and `n`: no", other)
    long = renamed(ContextTooLong("`messages`: long", "messages"), names)
    assert isinstance(long, ContextTooLong)
    assert renamed(RequestError("the body is bad"), names).param is None
