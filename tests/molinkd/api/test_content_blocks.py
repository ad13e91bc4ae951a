"""An answer's parts become consecutive blocks, however the answer was chunked."""

from hypothesis import given
from hypothesis import strategies as st

from molink.errors import ContextTooLong, RequestError
from molink.text.tool_calls.base import (
    AnswerPart,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)
from molinkd.api.content_blocks import (
    BlockEndedEvent,
    BlockEvent,
    BlockGrownEvent,
    BlockReader,
    BlockStartedEvent,
    read_blocks,
)
from molinkd.api.output_processor import TextPiece, TokenLogprob
from molinkd.api.protocol_conversion import rename_error_fields

CALL: list[AnswerPart] = [
    ToolCallBegin(0, "f"),
    ToolCallArguments(0, '{"a'),
    ToolCallArguments(0, '": 1}'),
]
RUNS = st.lists(
    st.sampled_from(
        [
            [TextDelta("a")],
            [TextDelta("b"), TextDelta("c")],
            [ReasoningDelta("t")],
            CALL,
            [*CALL, ToolCallEnd(0)],
        ]
    )
)


def steps_of(pieces: list[TextPiece]) -> tuple[list[BlockEvent], BlockReader]:
    reader = BlockReader()
    steps = [step for piece in pieces for step in reader.push_piece(piece)]
    return steps + reader.finish_blocks(), reader


@given(RUNS, st.integers(1, 4))
def test_chunk_boundaries_change_nothing(runs: list[list[AnswerPart]], size: int) -> None:
    parts = [part for run in runs for part in run]
    pieces = [TextPiece("", parts=parts[at : at + size]) for at in range(0, len(parts), size)]
    steps, reader = steps_of(pieces)
    blocks = reader.blocks
    assert blocks == read_blocks([TextPiece("", parts=parts)])
    assert blocks
    assert [block.index for block in blocks] == list(range(len(blocks)))
    # Each block starts after the previous one ended, and its growth adds up to its text.
    ends = [step for step in steps if not isinstance(step, BlockGrownEvent)]
    assert ends == [
        step for block in blocks for step in (BlockStartedEvent(block), BlockEndedEvent(block))
    ]
    for block in blocks:
        grown = [
            step.text for step in steps if isinstance(step, BlockGrownEvent) and step.block == block
        ]
        assert "".join(grown) == block.text
        assert (block.arguments is not None) == (block.kind == "call")
    said = [part.text for part in parts if not isinstance(part, ToolCallBegin | ToolCallEnd)]
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


def test_arguments_that_are_not_an_object() -> None:
    for text in ("", "[]", '{"a": 1', "{} {}", "[" * 100_000, '"x"', '{"a": NaN}'):
        (call,) = read_blocks(
            [TextPiece("", parts=[ToolCallBegin(0, "f"), ToolCallArguments(0, text)])]
        )
        assert call.arguments is None
        assert call.as_text() == f"f({text})"


def test_field_names_follow_the_protocol() -> None:
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
        error = rename_error_fields(RequestError(f"`{own}` and `n`: no", own), names)
        assert (str(error), error.param) == (f"`{other}` and `n`: no", other)
    long = rename_error_fields(ContextTooLong("`messages`: long", "messages"), names)
    assert isinstance(long, ContextTooLong)
    assert rename_error_fields(RequestError("the body is bad"), names).param is None
