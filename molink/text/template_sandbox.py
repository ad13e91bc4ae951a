"""Jinja2's immutable sandbox as ``transformers`` configures it, with a budget.

``transformers`` trusts templates to terminate. Here every loop iteration, call, filter, comparison
and output is charged before it happens, and values have an allowlist of methods. Hashing counts as
a comparison.

Jinja lets an environment intercept calls, filters and some operators, but not loops, comparisons
and concatenations; a rewrite of the syntax tree turns these into calls of the environment's
methods.
"""

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

import jinja2
import jinja2.nodes as nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, TemplateReference
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from molink.text.template_budget import TemplateBudget, TemplateTooCostly, size_of

_METHOD_NAMES = """
capitalize casefold count endswith find format index isalnum isalpha isascii isdecimal isdigit
isidentifier islower isnumeric isprintable isspace istitle isupper join lower lstrip partition
removeprefix removesuffix replace rfind rindex rpartition rsplit rstrip split splitlines
startswith strip swapcase title upper
"""
_PICKING_NAMES = """
abs attr count d default first float int items last length list map reject rejectattr reverse round
select selectattr
"""
_READING_NAMES = """
capitalize dictsort e escape forceescape format indent join lower max min replace safe sort string
title tojson trim truncate upper wordcount
"""
_FREE_TEST_NAMES = """
boolean callable defined escaped false filter float integer iterable mapping none number sameas
sequence string test true undefined
"""
#: Methods that a template may call, by type; other types have none.
_METHODS: tuple[tuple[type, frozenset[str]], ...] = (
    (str, frozenset(_METHOD_NAMES.split())),
    (dict, frozenset({"copy", "get", "items", "keys", "values"})),
    (list, frozenset({"copy", "count", "index"})),
    (tuple, frozenset({"count", "index"})),
)
#: Types with safe attributes.
_OPEN_TYPES = (LoopContext, Namespace, TemplateReference)
#: Filters that select from a sequence.
_PICKING_FILTERS = frozenset(_PICKING_NAMES.split())
#: Filters that read all of their input.
_READING_FILTERS = frozenset(_READING_NAMES.split())
#: Tests that inspect only a type or an identity.
_FREE_TESTS = frozenset(_FREE_TEST_NAMES.split())
_REMAINDER_OPERATORS = frozenset({"divisibleby", "even", "odd"})
_MAX_INDENT = 64
#: Maximum entries of a ``dict()``: colliding keys cost quadratic time.
_MAX_ENTRIES = 1024


class _GenerationTag(Extension):
    """The tag ``{% generation %}``, which marks answers for training; only its body is rendered."""

    tags = {"generation"}  # noqa: RUF012 - the base class wants a set

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _SafeNamespace(Namespace):
    """A ``namespace()`` without attributes that expose Python's internals."""

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


class SandboxEnvironment(ImmutableSandboxedEnvironment):
    """A template's environment; ``budget`` is replaced for each rendering.

    Not thread-safe: the owner must hold a lock while rendering.
    """

    intercepted_binops = frozenset({"+", "-", "*", "**", "%"})

    def __init__(self) -> None:
        # Disables constant folding, so that nothing is computed at compile time.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            finalize=_charge_output,
            extensions=[loopcontrols, _GenerationTag],
        )
        self.budget = TemplateBudget()
        #: Maximum cost of calling any macro, block or recursive loop, without inner loops.
        self._call_weight = 0
        self.filters = {
            name: self._metered_filter(name, _OWN_FILTERS.get(name, function))
            for name, function in self.filters.items()
            if name in _PICKING_FILTERS | _READING_FILTERS
        }
        tests: Mapping[str, Any] = self.tests
        self.tests = {
            name: test if name in _FREE_TESTS else self._metered_test(name, test)
            for name, test in tests.items()
        }
        self.globals = {
            "range": self.globals["range"],
            "dict": _new_dict,
            "namespace": _new_namespace,
            "raise_exception": _raise_exception,
            "strftime_now": self._strftime_now,
        }

    def compile_bounded(self, source: str) -> jinja2.Template:
        """Compile ``source`` with loops, comparisons and concatenations charged."""
        tree = self.parse(source)
        self._call_weight = add_accounting(tree)
        tree.set_environment(self)
        return self.from_string(tree)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Allow only methods that do not multiply a value's size uncharged."""
        for kind, names in _METHODS:
            if isinstance(obj, kind):
                return attr in names
        return isinstance(obj, _OPEN_TYPES) and super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Charge, then compute ``left operator right``."""
        self.budget.charge_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Charge ``str.format``."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        directives = str(value.__self__)

        def bounded(*args: Any, **kwargs: Any) -> str:
            self.budget.charge_format(directives, (*args, *kwargs.values()))
            return wrapped(*args, **kwargs)

        return bounded

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Charge ``obj[argument]``: slices are copied, others are hashed or quoted in errors."""
        if isinstance(argument, slice):
            self.budget.charge_copy(obj)
        else:
            self.budget.charge_text(argument)
        return super().getitem(obj, argument)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Charge a call of a macro, global or method."""
        owner = getattr(obj, "__self__", None)
        if isinstance(obj, Macro | BlockReference):
            self.budget.charge_amount(self._call_weight)
        elif isinstance(obj, LoopContext) and args:
            args = (self.iterate(args[0], self._call_weight), *args[1:])
        elif owner is not self:
            args = tuple(map(_as_list, args))
            self.budget.check_arguments((*args, *kwargs.values()))
            self.budget.charge_text(*args, *kwargs.values())
            if isinstance(owner, list | tuple):
                self.budget.charge_text(owner)
            else:
                self.budget.charge_copy(owner)
            if isinstance(owner, str):
                self._charge_method(owner, getattr(obj, "__name__", ""), args)
        return super().call(context, obj, *args, **kwargs)

    def iterate(self, values: Iterable[Any], weight: int) -> Iterator[Any]:
        """Charge each iteration over ``values``; not accessible to templates."""
        for value in values:
            self.budget.charge_amount(weight)
            yield value

    def readable(self, value: Any) -> Any:
        """Charge ``value`` before a comparison or hash; not accessible to templates."""
        value = _as_list(value)
        self.budget.charge_text(value)
        return value

    def concatenate(self, *parts: Any) -> str:
        """Charge and compute ``a ~ b``; not accessible to templates."""
        self.budget.charge_text(*parts)
        return "".join(map(str, parts))

    def _charge_method(self, owner: str, name: str, args: tuple[Any, ...]) -> None:
        if name == "join" and args:
            self.budget.charge_amount(len(owner) * len(args[0]))
        elif name == "replace" and len(args) >= 2:
            self.budget.charge_amount(_replacement_growth(owner, str(args[0]), str(args[1])))

    def _metered_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a filter to charge its input and output."""
        skipped = 1 if hasattr(function, "jinja_pass_arg") else 0

        @functools.wraps(function)
        def metered(*args: Any, **kwargs: Any) -> Any:
            args = tuple(map(_as_list, args))
            self._charge_filter(name, args[skipped:], kwargs)
            result = function(*args, **kwargs)
            self.budget.charge_copy(result)
            return result

        return metered

    def _metered_test(self, name: str, test: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a test to charge its operands."""

        @functools.wraps(test)
        def metered(*args: Any) -> Any:
            args = tuple(map(_as_list, args))
            self.budget.charge_text(*args)
            if name in _REMAINDER_OPERATORS:
                self.budget.charge_operator("%", args[0], args[1] if len(args) > 1 else 2)
            return test(*args)

        return metered

    def _charge_filter(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        value, others = args[0], (*args[1:], *kwargs.values())
        self.budget.check_arguments(others)
        if name in _PICKING_FILTERS:
            self.budget.charge_copy(value)
        else:
            self.budget.charge_text(value)
        self.budget.charge_text(*others)
        if name == "format":
            self.budget.charge_format(str(value), others)
        elif name in ("indent", "tojson"):
            width = max((4, *map(_option_width, others)))
            if width > _MAX_INDENT:
                raise TemplateTooCostly(f"it indents by {width}")
            self.budget.charge_text(value, times=width)

    def _strftime_now(self, form: str) -> str:
        self.budget.charge_format(form, ())
        return datetime.now().strftime(form[:256])


@jinja2.pass_context
def _charge_output(context: Context, value: Any) -> Any:
    environment = context.environment
    assert isinstance(environment, SandboxEnvironment)
    environment.budget.charge_text(value)
    return value


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Convert to JSON as ``transformers`` does; Jinja's own filter escapes HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@jinja2.pass_environment
def _join(
    environment: SandboxEnvironment, value: Iterable[Any], d: str = "", attribute: Any = None
) -> str:
    """Do ``join``, and charge its size in advance."""
    parts = list(value)
    if attribute is not None:
        parts = [environment.getitem(part, attribute) for part in parts]
    environment.budget.charge_text(*parts)
    environment.budget.charge_amount(len(d) * len(parts))
    return d.join(map(str, parts))


@jinja2.pass_environment
def _replace(
    environment: SandboxEnvironment, value: Any, old: Any, new: Any, count: int | None = None
) -> str:
    """Do ``replace``, and charge its size in advance."""
    text, old, new = str(value), str(old), str(new)
    environment.budget.charge_amount(_replacement_growth(text, old, new))
    return text.replace(old, new, -1 if count is None else count)


_OWN_FILTERS: dict[str, Callable[..., Any]] = {
    "join": _join,
    "replace": _replace,
    "tojson": _to_json,
}


def _as_list(value: Any) -> Any:
    """Convert an iterator to a list, so that it can be charged."""
    return list(value) if isinstance(value, Iterator) else value


def _new_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    if any(size_of(arg) > _MAX_ENTRIES for arg in args):
        raise TemplateTooCostly(f"it creates a dict of more than {_MAX_ENTRIES} entries")
    return dict(*args, **kwargs)


def _new_namespace(*args: Any, **kwargs: Any) -> Namespace:
    attributes = _new_dict(*args, **kwargs)
    for name in attributes:
        _check_attribute(name)
    return _SafeNamespace(attributes)


def _check_attribute(name: object) -> None:
    if str(name).startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace can't have an attribute {name!r}")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _option_width(option: object) -> int:
    """Return the width of a filter's option: a number of spaces, a text, or several of these."""
    if isinstance(option, tuple | list):
        return sum(map(_option_width, option))
    return option if isinstance(option, int) else len(str(option))


def _replacement_growth(text: str, old: str, new: str) -> int:
    return text.count(old) * len(new)


def add_accounting(tree: nodes.Template) -> int:
    """Rewrite ``tree`` before it is compiled.

    Loops call ``iterate``; operands of comparisons and dict keys call ``readable``; ``a ~ b`` calls
    ``concatenate``. Returns the maximum cost of calling any macro, block or recursive loop, without
    inner loops.
    """
    loops = list(tree.find_all(nodes.For))
    called = [loop.body for loop in loops if loop.recursive]
    called += [macro.body for macro in tree.find_all(nodes.Macro)]
    called += [block.body for block in tree.find_all(nodes.CallBlock)]
    called += [block.body for block in tree.find_all(nodes.Block)]
    call_weight = sum(map(_loop_weight, called))
    for loop in loops:
        weight = nodes.Const(_loop_weight(loop.body))
        loop.iter = _environment_call("iterate", [loop.iter, weight], loop.lineno)
    _rewrite_node(tree)
    return call_weight


def _loop_weight(body: Iterable[nodes.Node]) -> int:
    """Return the cost of one pass through ``body``, without iterations of inner loops."""
    total = 0
    for node in body:
        inner = list(node.find_all(nodes.Node))
        total += 8 * (1 + len(inner))
        total += sum(
            len(part.data) for part in (node, *inner) if isinstance(part, nodes.TemplateData)
        )
    return total


def _environment_call(name: str, arguments: list[Any], line: int) -> nodes.Call:
    """Create a call of an environment method, which template assignments can't shadow."""
    return nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None, lineno=line)


def _rewrite_node(node: nodes.Node) -> None:
    """Replace operations in ``node`` by calls that charge them."""
    for name, value in node.iter_fields():
        if isinstance(value, list):
            setattr(node, name, [_rewrite_value(item) for item in value])
        else:
            setattr(node, name, _rewrite_value(value))
    if isinstance(node, nodes.Compare | nodes.Operand):
        node.expr = _readable_call(node.expr)
    elif isinstance(node, nodes.Pair):
        node.key = _readable_call(node.key)


def _rewrite_value(value: Any) -> Any:
    if not isinstance(value, nodes.Node):
        return value
    _rewrite_node(value)
    if isinstance(value, nodes.Concat):
        return _environment_call("concatenate", value.nodes, value.lineno)
    return value


def _readable_call(node: nodes.Expr) -> nodes.Expr:
    return (
        node
        if isinstance(node, nodes.Const)
        else _environment_call("readable", [node], node.lineno)
    )
