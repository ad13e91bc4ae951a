"""The vision tower's file of a GGUF model is found by names that are in use."""

import pytest

from molink.gguf.gguf_file import find_mmproj

GEMMA = "gemma-3-4b-it-Q4_K_M.gguf"
OTHER = "Llama-3.2-3B-Instruct-Q4_K_M.gguf"


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["mmproj-model-f16.gguf"], "mmproj-model-f16.gguf"),
        (["mmproj-F32.gguf", "mmproj-F16.gguf", "mmproj-BF16.gguf"], "mmproj-BF16.gguf"),
        (["mmproj-gemma-3-4b-it-Q8_0.gguf", "mmproj-gemma-3-4b-it-f16.gguf"], 1),
        (["gemma-3-4b-it.mmproj-f16.gguf"], "gemma-3-4b-it.mmproj-f16.gguf"),
        (["mmproj.gguf", "mmproj-gemma-3-4b-it-f16.gguf", OTHER], 1),
        (["mmproj-renamed.gguf"], "mmproj-renamed.gguf"),
        (["mmproj-Qwen2.5-VL-7B-f16.gguf", OTHER], None),
        (["mmproj-gemma-3-12b-it-f16.gguf", OTHER], None),
        (["sub/mmproj-F16.gguf", "mmproj-F16.txt", "mmproj.json"], None),
        ([OTHER], None),
        ([], None),
    ],
)
def test_by_name(names: list[str], found: str | int | None) -> None:
    expected = names[found] if isinstance(found, int) else found
    assert find_mmproj(GEMMA, [GEMMA, *names]) == expected


def test_in_a_folder_of_a_repository() -> None:
    names = ["a/x.gguf", "a/mmproj-F16.gguf", "b/mmproj-x-F16.gguf"]
    assert find_mmproj("a/x.gguf", names) == "a/mmproj-F16.gguf"


def test_in_parts() -> None:
    parts = [f"big-0000{part}-of-00002.gguf" for part in (1, 2)]
    assert find_mmproj(parts[1], [*parts, "mmproj-renamed.gguf"]) == "mmproj-renamed.gguf"
