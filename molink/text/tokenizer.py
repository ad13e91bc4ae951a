"""A model's tokenizer, loaded from its folder, and fill-in-the-middle prompts."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import tokenizers

from molink.checkpoint.config_fields import read_bytes
from molink.checkpoint.model_task import read_task
from molink.errors import BrokenModel, ContextTooLong, RequestError
from molink.native import raise_as
from molink.text.chat_template import ChatTemplates, load_chat_templates
from molink.text.detokenizer import Detokenizer, IncrementalDetokenizer, WindowDetokenizer
from molink.text.generation_defaults import GenerationDefaults, TokenIds, parse_token_ids
from molink.text.text_growth import max_text_growth
from molink.text.token_pieces import create_token_pieces

#: Maximum characters of a text, before and after normalization.
MAX_TEXT_CHARACTERS = 8 * 2**20
MAX_GROWN_CHARACTERS = 16 * 2**20
_SPECIAL_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "sep_token",
    "cls_token",
)


T = TypeVar("T")


class _TextModel(msgspec.Struct):
    vocab_size: int | None = None


class _TokenizerModel(msgspec.Struct):
    """Fields of ``config.json``; a multimodal one has them in ``text_config``."""

    vocab_size: int | None = None
    eos_token_id: TokenIds = None
    text_config: _TextModel | None = None


class Tokenizer:
    """Encodes and decodes text; knows the model's chat templates and sampling defaults.

    Thread-safe. ``vocab_size`` bounds prompt ids, ``eos_ids`` end an answer, ``defaults`` apply to
    requests that set no sampling parameters, ``chat_template`` is the default one of
    ``chat_templates`` (``None`` for a base model), and ``added_tokens`` are never split.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        config: dict[str, Any],
        defaults: GenerationDefaults,
        templates: ChatTemplates,
        vocab_size: int = 0,
        longest: int = MAX_TEXT_CHARACTERS,
        *,
        appends_eos: bool = False,
    ) -> None:
        self._backend = backend
        self._max_token_characters = longest
        self._pieces = create_token_pieces(backend)
        added = backend.get_added_tokens_decoder()
        self.added_tokens = frozenset(token.content for token in added.values())
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self.vocab_size = vocab_size or backend.get_vocab_size()
        self.defaults = defaults
        self.chat_templates = templates
        self.chat_template = templates.default
        self._add_bos: bool | None = config.get("add_bos_token")
        self.bos_id = self._find_config_id(config.get("bos_token"))
        eos = self._find_config_id(config.get("eos_token"))
        #: Token appended to texts that get special tokens, unless ``tokenizer.json`` already
        #: appends one.
        self._appended_ids: list[int] = []
        if (
            appends_eos
            and eos is not None
            and not self.special_ids & {*backend.encode("a").ids[-1:]}
        ):
            self._appended_ids = [eos]
        own = () if eos is None else (eos,)
        self.eos_ids = tuple(dict.fromkeys((*own, *parse_token_ids(defaults.eos_token_id))))

    @classmethod
    def open(cls, folder: Path) -> "Tokenizer":
        """Load ``tokenizer.json`` and optional configs of a folder.

        Raises:
            BrokenModel: a file is missing or invalid.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise BrokenModel(f"{path} is missing; only models with a tokenizer.json can be served")
        source = read_bytes(path)
        longest = min(
            MAX_TEXT_CHARACTERS, MAX_GROWN_CHARACTERS // max_text_growth(source, str(path))
        )
        config = _read_object(folder / "tokenizer_config.json")
        model = _read_struct(folder / "config.json", _TokenizerModel) or _TokenizerModel()
        special = _special_token_texts(_read_object(folder / "special_tokens_map.json"))
        special.update(_special_token_texts(config))
        defaults = GenerationDefaults.load_folder(folder)
        if defaults.eos_token_id is None and "eos_token" not in config:
            defaults = msgspec.structs.replace(defaults, eos_token_id=model.eos_token_id)
        templates = load_chat_templates(folder, config, special)
        with raise_as(lambda reason: BrokenModel(f"{path}: {reason}; fetch the file again")):
            backend = tokenizers.Tokenizer.from_buffer(source)
            backend.no_padding()
            backend.no_truncation()
            backend.encode("")  # this fails if special tokens of the post-processor are missing
            inner = model.text_config or _TextModel()
            size = model.vocab_size or inner.vocab_size or 0
            # Only embedding models mean this setting; other models' files have it left over from
            # training.
            ends = config.get("add_eos_token") is True and read_task(folder).name == "embed"
            made = cls(backend, config, defaults, templates, size, longest, appends_eos=ends)
        named = special.get("eos_token") or parse_token_ids(defaults.eos_token_id)
        if named and not any(0 <= one < made.vocab_size for one in made.eos_ids):
            raise BrokenModel(
                f"{folder}: the end-of-sequence token (eos_token, eos_token_id: {str(named)[:80]}) "
                "is not in its vocabulary; fetch its tokenizer and configs again"
            )
        return made

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Encode ``text``; ``special`` adds special tokens such as BOS.

        Use ``special=False`` for rendered chat templates, which contain them. A text of megabytes
        may take seconds; the GIL is released.

        Raises:
            ContextTooLong: the text is too long to tokenize.
            RequestError: the text is invalid, such as broken Unicode.
        """
        if len(text) > self._max_token_characters:
            raise ContextTooLong(
                f"the text has {len(text)} characters; this model's tokenizer takes "
                f"{self._max_token_characters}"
            )
        with raise_as(lambda reason: RequestError(f"the text can't be tokenized: {reason}")):
            # Unlike encode(), encode_batch() releases the GIL.
            ids: list[int] = self._backend.encode_batch([text], add_special_tokens=special)[0].ids
        if not special:
            return ids
        ids += self._appended_ids
        if self.bos_id is None or self._add_bos is None:
            return ids
        has_bos = ids[:1] == [self.bos_id]
        if self._add_bos and not has_bos:
            return [self.bos_id, *ids]
        if not self._add_bos and has_bos:
            return self.encode(text, special=False) + self._appended_ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Decode ``ids``."""
        with raise_as(BrokenModel):
            return self._backend.decode(list(ids), skip_special_tokens=skip_special)

    def token_bytes(self, token: int) -> bytes:
        """Return a token's bytes, which may be part of a character."""
        if self._pieces is not None:
            return self._pieces.get_bytes(token)
        return self.decode([token], skip_special=False).encode("utf-8")

    def find_special_ids(self, texts: Iterable[str]) -> dict[str, int]:
        """Return the ids of those ``texts`` that are special tokens."""
        ids = {text: self._backend.token_to_id(text) for text in texts}
        return {text: token for text, token in ids.items() if token in self.special_ids}

    def create_detokenizer(
        self,
        *,
        skip_special: bool = True,
        continues: bool = False,
        keep: frozenset[str] = frozenset(),
    ) -> Detokenizer:
        """Create a detokenizer for one answer.

        ``continues`` keeps a leading space; special tokens in ``keep`` are not skipped.
        """
        kept = self.find_special_ids(keep).values()
        skip = self.special_ids.difference(kept) if skip_special else frozenset()
        if self._pieces is None:
            return WindowDetokenizer(self._backend, skip)
        return IncrementalDetokenizer(self._pieces, skip, continues=continues)

    @property
    def token_texts(self) -> dict[int, str]:
        """Text of each token as in the files, including added tokens."""
        return {index: text for text, index in self._backend.get_vocab().items()}

    def find_token_id(self, text: str) -> int | None:
        """Return the id of the token ``text``; ``None`` if there is none."""
        return self._find_config_id(text)

    def _find_config_id(self, token: Any) -> int | None:
        text = token.get("content") if isinstance(token, dict) else token
        return self._backend.token_to_id(text) if isinstance(text, str) else None


def _read_object(path: Path) -> dict[str, Any]:
    return _read_struct(path, dict[str, Any]) or {}


def _read_struct(path: Path, kind: type[T]) -> T | None:
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(read_bytes(path), type=kind)
    except (ValueError, RecursionError) as error:
        raise BrokenModel(f"{path}: {error}; fetch the file again") from error


def _special_token_texts(config: dict[str, Any]) -> dict[str, str]:
    """Read ``bos_token`` etc., which configs write as a text or as an object."""
    found = {}
    for name in _SPECIAL_TOKEN_NAMES:
        token = config.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            found[name] = text
    return found


#: Tokens of each family before the prefix, before the suffix, and before the answer, in this order.
#: Bavarian et al., "Efficient Training of Language Models to Fill in the Middle", §3.
_FIM_TOKENS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
)


def build_fim_prompt(
    tokenizer: Tokenizer, before: Sequence[int], after: Sequence[int]
) -> list[int] | None:
    """Build a fill-in-the-middle prompt; ``None`` if the model has no such tokens."""
    for marks in _FIM_TOKENS:
        found = [tokenizer.find_token_id(mark) for mark in marks]
        if None not in found:
            prefix, suffix, middle = (one for one in found if one is not None)
            begin = [token for token in tokenizer.encode("") if token == tokenizer.bos_id]
            return [*begin, prefix, *before, suffix, *after, middle]
    return None
