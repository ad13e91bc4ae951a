"""The state of a conversation in the terminal, and its commands, as ``ollama run`` has them."""

import base64
import mimetypes
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec

from molink.errors import UsageError
from molinkd.cli.translation import tr, tr_count

#: The first word of a command; paths and questions may start with a slash, too.
_COMMAND = re.compile(r"/[A-Za-z?]+")
#: Formats a command of molink for a hint if no home is known.
FORMAT_COMMAND = "`molink {}`".format
#: Begins and ends a question of several lines.
QUOTES = '"""'
#: Largest image file, in bytes; the endpoint takes requests of 32 MiB, a third of it for base64.
MAX_IMAGE_BYTES = 20 << 20
#: Parameters of ``/set parameter``: the request's field, and how its value is read. The first names
#: are Ollama's.
_PARAMETERS: dict[str, tuple[str, Callable[[str], object]]] = {
    "num_predict": ("max_tokens", int),
    "repeat_penalty": ("repetition_penalty", float),
    "temperature": ("temperature", float),
    "top_k": ("top_k", int),
    "top_p": ("top_p", float),
    "min_p": ("min_p", float),
    "presence_penalty": ("presence_penalty", float),
    "frequency_penalty": ("frequency_penalty", float),
    "seed": ("seed", int),
    "stop": ("stop", str),
    "max_tokens": ("max_tokens", int),
    "repetition_penalty": ("repetition_penalty", float),
}


class _Message(msgspec.Struct):
    """A message of a saved conversation."""

    role: Annotated[str, msgspec.Meta(min_length=1)]
    content: str | list[dict[str, Any]]


class _SavedConversation(msgspec.Struct):
    """A file of ``/save``."""

    model: str
    messages: list[_Message]
    system: str | None = None
    options: dict[str, Any] = {}


class Conversation(msgspec.Struct):
    """The state sent with each question. ``options`` are extra request fields.

    ``format_command`` is ``Home.format_command`` of the endpoint's home. ``usage`` counts the
    tokens of the last answer, if ``is_verbose``. ``images`` are parts of the next question.
    """

    base_url: str
    model: str
    api_key: str | None = None
    system: str | None = None
    options: dict[str, Any] = {}
    messages: list[dict[str, Any]] = []
    format_command: Callable[[str], str] = FORMAT_COMMAND
    is_verbose: bool = False
    usage: dict[str, int] = {}
    images: list[dict[str, Any]] = []

    def attach_image(self, path: Path) -> None:
        """Show the image in ``path`` with the next question.

        Raises:
            UsageError: the file can't be read, or is too large.
        """
        try:
            with path.open("rb") as file:
                data = file.read(MAX_IMAGE_BYTES + 1)
        except OSError as error:
            raise UsageError(f"can't read {path}: {error.strerror or error}") from None
        if len(data) > MAX_IMAGE_BYTES:
            raise UsageError(f"{path} is larger than {MAX_IMAGE_BYTES >> 20} MiB")
        kind = mimetypes.guess_type(path.name)[0] or "image/png"
        url = f"data:{kind};base64,{base64.b64encode(data).decode()}"
        self.images.append({"type": "image_url", "image_url": {"url": url}})

    def add_question(self, text: str) -> None:
        """Append a question with the images that were attached to it."""
        content = [*self.images, {"type": "text", "text": text}] if self.images else text
        self.messages.append({"role": "user", "content": content})
        self.images = []

    def request_body(self) -> dict[str, Any]:
        """Return the request for the next answer."""
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        usage = {"stream_options": {"include_usage": True}} if self.is_verbose else {}
        messages = [*first, *self.messages]
        return {
            **self.options,
            **usage,
            "model": self.model,
            "messages": messages,
            "stream": True,
        }

    def save_file(self, path: Path) -> None:
        """Write model, messages and settings as JSON; replaces only a file of its own.

        Raises:
            UsageError: the file is another one, or can't be written.
        """
        if path.exists():
            _read_saved(path)
        messages = [_Message(one["role"], one["content"]) for one in self.messages]
        saved = _SavedConversation(self.model, messages, self.system, self.options)
        try:
            path.write_bytes(msgspec.json.format(msgspec.json.encode(saved)) + b"\n")
        except OSError as error:
            raise UsageError(f"can't write {path}: {error.strerror or error}") from None

    def load_file(self, path: Path) -> None:
        """Continue a saved conversation.

        Raises:
            UsageError: the file can't be read, or holds no conversation.
        """
        saved = _read_saved(path)
        self.model, self.system, self.options = saved.model, saved.system, saved.options
        self.messages = [{"role": one.role, "content": one.content} for one in saved.messages]


def _read_saved(path: Path) -> _SavedConversation:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_SavedConversation)
    except OSError as error:
        raise UsageError(f"can't read {path}: {error.strerror or error}") from None
    except msgspec.MsgspecError:
        raise UsageError(f"{path} is not a conversation that /save wrote") from None


def run_command(conversation: Conversation, line: str) -> str | None:
    """Run ``line`` if it is a command; returns what to print, ``None`` for a question.

    Raises:
        EOFError: it ends the conversation.
        UsageError: the command is unknown or incomplete.
    """
    word, _, rest = line.partition(" ")
    rest = rest.strip()
    if not _COMMAND.fullmatch(word):
        return None
    match word:
        case "/bye" | "/exit" | "/quit":
            raise EOFError
        case "/help" | "/?":
            return _describe_commands()
        case "/clear":
            conversation.messages.clear()
            conversation.images.clear()
            return tr("Conversation cleared.")
        case "/set":
            return _set_option(conversation, rest)
        case "/system":
            return _set_option(conversation, f"system {rest}")
        case "/show":
            return _show_state(conversation, rest or "info")
        case "/model" | "/image" | "/save" | "/load":
            return _run_named(conversation, word, rest)
    if rest:
        return None  # a question that starts with a slash
    raise UsageError(tr("Unknown command '{word}'; /help lists all", word=word))


def _run_named(conversation: Conversation, word: str, name: str) -> str:
    """Run a command about a model or a file."""
    if not name:
        raise UsageError(tr("{word} needs a name; /help shows how", word=word))
    path = Path(name).expanduser()
    match word:
        case "/model":
            conversation.model = name
            return tr("Asking {model} from now on.", model=name)
        case "/image":
            conversation.attach_image(path)
            return tr("{file} goes with the next question.", file=path.name)
        case "/save":
            conversation.save_file(path)
            return tr("Saved to {path}.", path=path)
        case _:
            conversation.load_file(path)
            return f"{conversation.model}: {_count_messages(conversation)}"


def _set_option(conversation: Conversation, text: str) -> str:
    word, _, rest = text.partition(" ")
    rest, options = rest.strip(), conversation.options
    match word:
        case "parameter":
            return _set_parameter(conversation, rest)
        case "system":
            conversation.system = rest.strip('"') or None
            is_set = conversation.system is not None
            return tr("System prompt set.") if is_set else tr("System prompt removed.")
        case "think" | "nothink":
            options["chat_template_kwargs"] = {"enable_thinking": word == "think"}
        case "format" if rest == "json":
            options["response_format"] = {"type": "json_object"}
        case "noformat":
            options.pop("response_format", None)
        case "verbose" | "quiet":
            conversation.is_verbose = word == "verbose"
        case _:
            what = text or tr("nothing")
            raise UsageError(tr("can't set {what}; /help shows what can be set", what=what))
    return tr("Set {what}.", what=text)


def _set_parameter(conversation: Conversation, text: str) -> str:
    name, _, value = text.partition(" ")
    if name not in _PARAMETERS:
        known = ", ".join(_PARAMETERS)
        raise UsageError(tr("unknown parameter {name}; known are {known}", name=name, known=known))
    field, read = _PARAMETERS[name]
    if not value.strip():
        conversation.options.pop(field, None)
        return tr("{name} is the model's default again.", name=name)
    try:
        conversation.options[field] = read(value.strip())
    except ValueError:
        raise UsageError(
            tr("{name} must be a number, not {value}", name=name, value=value.strip())
        ) from None
    return tr("{name} is {value}.", name=name, value=conversation.options[field])


def _show_state(conversation: Conversation, what: str) -> str:
    match what:
        case "info":
            return "\n".join(
                (conversation.model, conversation.base_url, _count_messages(conversation))
            )
        case "parameters":
            lines = (f"{name} {value}" for name, value in conversation.options.items())
            return "\n".join(lines) or tr("All parameters are the model's defaults.")
        case "system":
            return conversation.system or tr("No system prompt: the model's default.")
        case "messages":
            lines = (f"{one['role']}: {_text_of(one['content'])}" for one in conversation.messages)
            return "\n\n".join(lines) or tr("No messages yet.")
    raise UsageError(tr("can't show {what}: info, parameters, system or messages", what=what))


def _count_messages(conversation: Conversation) -> str:
    return tr_count("{count} message", "{count} messages", len(conversation.messages))


def _describe_commands() -> str:
    return tr(
        """\
/set parameter NAME VALUE   temperature, top_k, top_p, seed, num_predict, stop …
/set system TEXT            the system prompt; /system TEXT does the same
/set think, nothink         whether the model reasons, if it lets you choose
/set format json, noformat  answers as JSON, or as any text
/set verbose, quiet         whether to show tokens and times of each answer
/show info, parameters, system, messages
/image FILE                 show the model an image with the next question
/model NAME                 ask another model from now on
/save FILE, /load FILE      write the conversation to a file, or continue one
/clear                      forget the conversation; the settings stay
/bye, /exit                 quit
\"""                         begins and ends a question of several lines
Ctrl-C stops an answer."""
    )


def _text_of(content: str | list[dict[str, Any]]) -> str:
    """The text of a message, with a word for each image."""
    if isinstance(content, str):
        return content
    return " ".join(str(part.get("text", "(image)")) for part in content)
