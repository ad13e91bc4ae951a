"""Jinja2's immutable sandbox as ``transformers`` sets it up, with a budget on top.

``transformers`` trusts a template to end and to be modest. Here every loop round, call, filter and
output is accounted for, and strings have only methods whose result is bounded.
"""

import functools
import json
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any

import jinja2
import jinja2.nodes as nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from molink.text.budget import Budget, TemplateTooCostly

_METHOD_NAMES = """
capitalize casefold count endswith find format index isalnum isalpha isascii isdecimal isdigit
isidentifier islower isnumeric isprintable isspace istitle isupper join lower lstrip partition
removeprefix removesuffix replace rfind rindex rpartition rsplit rstrip split splitlines
startswith strip swapcase title upper
"""
_PICKING_NAMES = """
abs attr count d default dictsort first float groupby int items last length list map max min
reject rejectattr reverse round select selectattr sort unique
"""
_WRITING_NAMES = """
capitalize e escape forceescape format indent join lower replace safe string title tojson trim
truncate upper wordcount
"""
_STRING_METHODS = frozenset(_METHOD_NAMES.split())
#: Filters that pick from a sequence.
_PICKING = frozenset(_PICKING_NAMES.split())
#: Filters that write their input out as text.
_WRITING = frozenset(_WRITING_NAMES.split())
_MAX_INDENT = 64


class _Generation(Extension):
    """``{% generation %}``, with which templates mark answers for training: its body as it is."""

    tags = {"generation"}  # noqa: RUF012 - the base class wants a set

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _SafeNamespace(Namespace):
    """``namespace()`` without attributes that lead into Python's internals."""

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


class SandboxEnvironment(ImmutableSandboxedEnvironment):
    """One template's environment; ``budget`` is replaced for each rendering.

    Not for use by two threads at once: the owner holds a lock while rendering.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        # No optimizer, and a finalizer that needs the context: nothing is computed while compiling.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            finalize=_charge_output,
            extensions=[loopcontrols, _Generation],
        )
        self.budget = Budget()
        #: What a call of any macro of the template costs at most, loops not counted.
        self._macro_weight = 0
        self.filters = {
            name: self._metered(name, _OWN_FILTERS.get(name, function))
            for name, function in self.filters.items()
            if name in _PICKING | _WRITING
        }
        self.globals = {
            "range": self.globals["range"],
            "dict": _new_dict,
            "namespace": _new_namespace,
            "raise_exception": _raise_exception,
            "strftime_now": self._strftime_now,
        }

    def compile_bounded(self, source: str) -> jinja2.Template:
        """Compile ``source`` with every loop and concatenation accounted for."""
        tree = self.parse(source)
        self._macro_weight = sum(_weight(macro.body) for macro in tree.find_all(nodes.Macro))
        self._macro_weight += sum(_weight(block.body) for block in tree.find_all(nodes.CallBlock))
        for loop in list(tree.find_all(nodes.For)):
            weight = nodes.Const(_weight(loop.body))
            loop.iter = _call("iterate", [loop.iter, weight], loop.lineno)
        _replace_concatenations(tree)
        tree.set_environment(self)
        return self.from_string(tree)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Strings have only methods that don't multiply their size unnoticed."""
        if isinstance(obj, str) and attr not in _STRING_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """``left operator right`` within the budget."""
        self.budget.binary(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """``str.format`` as the sandbox wraps it, within the budget."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        directives = str(value.__self__)

        def bounded(*args: Any, **kwargs: Any) -> str:
            self.budget.format(directives, (*args, *kwargs.values()))
            return wrapped(*args, **kwargs)

        return bounded

    def getitem(self, obj: Any, argument: Any) -> Any:
        """``obj[argument]``; a slice is a copy."""
        if isinstance(argument, slice):
            self.budget.spend_on_copy(obj)
        return super().getitem(obj, argument)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call ``obj``, a macro, a global or a method, within the budget."""
        owner = getattr(obj, "__self__", None)
        if isinstance(obj, Macro):
            self.budget.spend(self._macro_weight)
        elif owner is not self:
            self.budget.check_arguments((*args, *kwargs.values()))
            self.budget.spend_on_copy(owner, *args)
            if isinstance(owner, str):
                args = self._charge_method(owner, getattr(obj, "__name__", ""), args)
        return super().call(context, obj, *args, **kwargs)

    def iterate(self, values: Iterable[Any], weight: int) -> Iterator[Any]:
        """``values``, each round of the loop accounted for; templates can't name this."""
        for value in values:
            self.budget.spend(weight)
            yield value

    def concatenate(self, *parts: Any) -> str:
        """``a ~ b``; templates can't name this."""
        self.budget.spend_on_text(*parts)
        return "".join(map(str, parts))

    def _charge_method(self, owner: str, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if name == "join" and args:
            parts = list(args[0])
            self.budget.spend_on_text(*parts)
            self.budget.spend(len(owner) * len(parts))
            return (parts, *args[1:])
        if name == "replace" and len(args) >= 2:
            self.budget.spend(_growth(owner, str(args[0]), str(args[1])))
        return args

    def _metered(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that accounts for its input and its output."""
        skipped = 1 if hasattr(function, "jinja_pass_arg") else 0

        @functools.wraps(function)
        def metered(*args: Any, **kwargs: Any) -> Any:
            self._charge_filter(name, args[skipped:], kwargs)
            result = function(*args, **kwargs)
            self.budget.spend_on_copy(result)
            return result

        return metered

    def _charge_filter(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        value, others = args[0], (*args[1:], *kwargs.values())
        self.budget.check_arguments(others)
        if name in _PICKING:
            self.budget.spend_on_copy(value)
        else:
            self.budget.spend_on_text(value)
        if name == "replace" and len(args) >= 3:
            self.budget.spend(_growth(str(value), str(args[1]), str(args[2])))
        elif name == "format":
            self.budget.format(str(value), others)
        elif name in ("indent", "tojson"):
            width = max((other for other in others if isinstance(other, int)), default=4)
            if width > _MAX_INDENT:
                raise TemplateTooCostly(f"it indents by {width}")
            self.budget.spend_on_text(value, times=width)

    def _strftime_now(self, form: str) -> str:
        self.budget.format(form, ())
        return datetime.now().strftime(form[:256])


@jinja2.pass_context
def _charge_output(context: Context, value: Any) -> Any:
    environment = context.environment
    assert isinstance(environment, SandboxEnvironment)
    environment.budget.spend_on_text(value)
    return value


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As ``transformers`` does it: Jinja's own escapes HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


@jinja2.pass_environment
def _join(
    environment: SandboxEnvironment, value: Iterable[Any], d: str = "", attribute: Any = None
) -> str:
    """``join`` that knows its size before it exists."""
    parts = list(value)
    if attribute is not None:
        parts = [environment.getitem(part, attribute) for part in parts]
    environment.budget.spend_on_text(*parts)
    environment.budget.spend(len(d) * len(parts))
    return d.join(map(str, parts))


_OWN_FILTERS: dict[str, Callable[..., Any]] = {"tojson": _to_json, "join": _join}


def _new_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _new_namespace(*args: Any, **kwargs: Any) -> Namespace:
    attributes = dict(*args, **kwargs)
    for name in attributes:
        _check_attribute(name)
    return _SafeNamespace(attributes)


def _check_attribute(name: object) -> None:
    if str(name).startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace can't have an attribute {name!r}")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _growth(text: str, old: str, new: str) -> int:
    return text.count(old) * len(new)


def _weight(body: Iterable[nodes.Node]) -> int:
    """What one run through ``body`` costs, without the rounds of its inner loops."""
    total = 0
    for node in body:
        inner = list(node.find_all(nodes.Node))
        total += 8 * (1 + len(inner))
        total += sum(
            len(part.data) for part in (node, *inner) if isinstance(part, nodes.TemplateData)
        )
    return total


def _call(name: str, arguments: list[Any], line: int) -> nodes.Call:
    """A call of a method of the environment, which no assignment in a template can shadow."""
    return nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None, lineno=line)


def _replace_concatenations(node: nodes.Node) -> None:
    """Turn each ``a ~ b`` into a call that accounts for its result."""
    for name, value in node.iter_fields():
        if isinstance(value, list):
            setattr(node, name, [_replaced(item) for item in value])
        else:
            setattr(node, name, _replaced(value))


def _replaced(value: Any) -> Any:
    if not isinstance(value, nodes.Node):
        return value
    _replace_concatenations(value)
    if isinstance(value, nodes.Concat):
        return _call("concatenate", value.nodes, value.lineno)
    return value
