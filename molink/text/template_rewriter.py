"""Rewrites the syntax tree of a chat template so that its environment accounts for what it does.

Jinja lets an environment intercept calls, filters and some operators, but no loops, comparisons and
concatenations; these become calls of the environment's methods here.
"""

from collections.abc import Iterable
from typing import Any

import jinja2.nodes as nodes


def add_accounting(tree: nodes.Template) -> int:
    """Rewrite ``tree``, before it is compiled.

    Loops call ``iterate``, operands of comparisons and keys of objects ``readable``, ``a ~ b``
    ``concatenate``. Returns what a call of any macro, block or recursive loop costs at most, inner
    loops not counted.
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
    """What one run through ``body`` costs, without the rounds of its inner loops."""
    total = 0
    for node in body:
        inner = list(node.find_all(nodes.Node))
        total += 8 * (1 + len(inner))
        total += sum(
            len(part.data) for part in (node, *inner) if isinstance(part, nodes.TemplateData)
        )
    return total


def _environment_call(name: str, arguments: list[Any], line: int) -> nodes.Call:
    """A call of a method of the environment, which no assignment in a template can shadow."""
    return nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None, lineno=line)


def _rewrite_node(node: nodes.Node) -> None:
    """Turn what the budget has to know of, in ``node``, into calls that account for it."""
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
