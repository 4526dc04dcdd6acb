"""Formulas: a small part of Python's expressions, parsed once, evaluated and checked for units.

A formula may hold numbers, symbols, arithmetic, comparisons, conditions and calls of
``functions.FUNCTIONS``; a rule also strings, lists, sets and look-ups. Anything else, such as an
attribute, is refused when the formula is parsed, so that evaluating one runs no code of its own.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from headrace.core.errors import InternalError
from headrace.explain.catalogue.functions import FUNCTIONS, SAME_UNIT
from headrace.explain.catalogue.units import PLAIN, Unit

_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
    ast.Pow: lambda a, b: a**b,
}
_COMPARE: Mapping[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
_PLAIN_NODES = (
    *(ast.Expression, ast.BinOp, ast.UnaryOp, ast.USub, ast.Not, ast.BoolOp, ast.And, ast.Or),
    *(ast.Compare, ast.IfExp, ast.Call, ast.Name, ast.Load, ast.Constant, ast.List, ast.Tuple),
    *(ast.Set, ast.Dict, ast.Subscript, *_BINARY, *_COMPARE),
)


@lru_cache(maxsize=4096)
def parse(text: str) -> ast.expr:
    """The tree of a formula.

    Raises:
        InternalError: it does not parse, or holds what no formula may hold.
    """
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError as error:
        raise InternalError(f"formula {text!r}: {error.msg}") from None
    for node in ast.walk(tree):
        if not isinstance(node, _PLAIN_NODES):
            raise InternalError(f"formula {text!r} holds {type(node).__name__}, which none may")
        if isinstance(node, ast.Call) and not (
            isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS and not node.keywords
        ):
            raise InternalError(f"formula {text!r} calls what is no function of formulas")
        if isinstance(node, ast.Constant) and not isinstance(node.value, bool | int | float | str):
            raise InternalError(f"formula {text!r} holds the constant {node.value!r}")
    return tree.body


def symbols_of(text: str) -> frozenset[str]:
    """The symbols that a formula names."""
    tree = parse(text)
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    return frozenset(
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in called
    )


def evaluate(text: str, values: Mapping[str, Any]) -> Any:
    """The value of a formula.

    Raises:
        InternalError: a symbol has no value, it divides by zero, or a number is too large.
    """
    try:
        return _value(parse(text), values)
    except ZeroDivisionError:
        raise InternalError(f"formula {text!r} divides by zero") from None
    except (OverflowError, ValueError) as error:
        raise InternalError(f"formula {text!r}: {error}") from None
    except KeyError as error:
        raise InternalError(f"formula {text!r}: {error} has no value") from None


def _value(node: ast.expr, values: Mapping[str, Any]) -> Any:
    def of(inner: ast.expr) -> Any:
        return _value(inner, values)

    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            return values[node.id]
        case ast.BinOp():
            return _BINARY[type(node.op)](of(node.left), of(node.right))
        case ast.UnaryOp():
            return not of(node.operand) if isinstance(node.op, ast.Not) else -of(node.operand)
        case ast.IfExp():
            return of(node.body) if of(node.test) else of(node.orelse)
        case ast.Compare():
            return _compare(node, of)
        case ast.BoolOp():
            terms = (bool(of(term)) for term in node.values)
            return all(terms) if isinstance(node.op, ast.And) else any(terms)
        case ast.Call():
            assert isinstance(node.func, ast.Name)
            return FUNCTIONS[node.func.id](*map(of, node.args))
        case ast.List() | ast.Tuple() | ast.Set():
            return [of(item) for item in node.elts]
        case ast.Dict():
            return {
                of(k): of(v) for k, v in zip(node.keys, node.values, strict=True) if k is not None
            }
        case ast.Subscript():
            return of(node.value)[of(node.slice)]
        case _:
            raise InternalError(f"a formula holds {type(node).__name__}")


def _compare(node: ast.Compare, of: Callable[[ast.expr], Any]) -> bool:
    left = of(node.left)
    for compare, comparator in zip(node.ops, node.comparators, strict=True):
        right = of(comparator)
        if not _COMPARE[type(compare)](left, right):
            return False
        left = right
    return True


def unit_of(text: str, units: Mapping[str, Unit]) -> Unit:
    """The unit of a formula.

    Raises:
        InternalError: it adds or compares different units, or takes a power or a function of what
            is not a count, or names a symbol without a unit.
    """
    unit = _unit(parse(text), units, text)
    return PLAIN if unit is None else unit


def _unit(node: ast.expr, units: Mapping[str, Unit], text: str) -> Unit | None:
    """The unit of ``node``; None for the number 0, which has every unit."""

    def of(inner: ast.expr) -> Unit | None:
        return _unit(inner, units, text)

    def same(*nodes: ast.expr) -> Unit | None:
        found = {unit for unit in map(of, nodes) if unit is not None}
        if len(found) > 1:
            names = " and ".join(sorted(map(str, found)))
            raise InternalError(f"formula {text!r} puts {names} together in {ast.unparse(node)!r}")
        return found.pop() if found else None

    def count(inner: ast.expr) -> None:
        unit = of(inner)
        if unit is not None and not unit.plain:
            raise InternalError(
                f"formula {text!r}: {ast.unparse(inner)!r} is in {unit}, not a count"
            )

    match node:
        case ast.Constant():
            return None if node.value == 0 else PLAIN
        case ast.Name():
            if node.id not in units:
                raise InternalError(f"formula {text!r} uses {node.id!r}, which is no symbol")
            return units[node.id]
        case ast.BinOp():
            return _binary_unit(node, of, same, count)
        case ast.UnaryOp():
            return PLAIN if isinstance(node.op, ast.Not) else of(node.operand)
        case ast.IfExp():
            of(node.test)
            return same(node.body, node.orelse)
        case ast.Compare():
            same(node.left, *node.comparators)
            return PLAIN
        case ast.BoolOp():
            for term in node.values:
                count(term)
            return PLAIN
        case ast.Call():
            assert isinstance(node.func, ast.Name)
            if node.func.id in SAME_UNIT:
                return same(*node.args)
            for argument in node.args:
                count(argument)
            return PLAIN
        case _:
            raise InternalError(f"formula {text!r}: {type(node).__name__} has no unit")


def _binary_unit(
    node: ast.BinOp,
    of: Callable[[ast.expr], Unit | None],
    same: Callable[..., Unit | None],
    count: Callable[[ast.expr], None],
) -> Unit | None:
    match node.op:
        case ast.Add() | ast.Sub() | ast.Mod():
            return same(node.left, node.right)
        case ast.Mult():
            left, right = of(node.left), of(node.right)
            return None if left is None or right is None else left * right
        case ast.Div() | ast.FloorDiv():
            left, right = of(node.left), of(node.right)
            return None if left is None else left / (right or PLAIN)
        case _:
            count(node.right)
            base = of(node.left)
            if base is not None and not base.plain:
                if not (isinstance(node.right, ast.Constant) and isinstance(node.right.value, int)):
                    raise InternalError("a power of what has a unit needs a whole number")
                return base.power(node.right.value)
            return base
