"""Formulas as text that is evaluated: what a figure says of itself is what was computed."""

from __future__ import annotations

import ast
import math
from typing import TYPE_CHECKING

from kvtier.errors import InvalidRequest
from kvtier.plan.units import Quantity

if TYPE_CHECKING:
    from collections.abc import Callable

_FUNCTIONS = "max", "min", "ceil"
_MOST_CHARACTERS = 1000
_DEEPEST = 200


def names(formula: str) -> tuple[str, ...]:
    """The names that `formula` uses, dotted ones whole, each once, in its order.

    Raises InvalidRequest for anything but + - * / parentheses, numbers, names, max, min and ceil.
    """
    found: dict[str, None] = {}

    def note(name: str) -> Quantity:
        found[name] = None
        return Quantity(1.0)

    _walk(_parse(formula), formula, note, lambda _node, _arguments: Quantity(1.0))
    return tuple(found)


def evaluate(formula: str, value: Callable[[str], Quantity]) -> Quantity:
    """`formula` with each name's `value`. ceil rounds up in base units.

    Raises InvalidRequest as `names` does, UnitError for dimensions that do not go together, and
    ZeroDivisionError.
    """
    return _walk(_parse(formula), formula, value, _apply)


def _parse(formula: str) -> ast.expr:
    if len(formula) > _MOST_CHARACTERS:
        raise InvalidRequest(f"a formula of {len(formula)} characters, needs at most {_MOST_CHARACTERS}")
    try:
        return ast.parse(formula.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InvalidRequest(f"formula {formula!r} cannot be read: {error}") from error


def _apply(node: ast.expr, arguments: list[Quantity]) -> Quantity:
    match node:
        case ast.BinOp(op=ast.Add()):
            return arguments[0] + arguments[1]
        case ast.BinOp(op=ast.Sub()):
            return arguments[0] - arguments[1]
        case ast.BinOp(op=ast.Mult()):
            return arguments[0] * arguments[1]
        case ast.BinOp(op=ast.Div()):
            return arguments[0] / arguments[1]
        case ast.UnaryOp():
            return -arguments[0]
        case ast.Call(func=ast.Name(id="ceil")):
            # What was rounded away in floating point is not a whole machine.
            return Quantity(math.ceil(arguments[0].value - 1e-9), arguments[0].dimensions)
        case ast.Call(func=ast.Name(id="max")):
            return max(arguments)
        case _:
            return min(arguments)


def _walk(
    node: ast.expr,
    formula: str,
    value: Callable[[str], Quantity],
    apply: Callable[[ast.expr, list[Quantity]], Quantity],
    depth: int = 0,
) -> Quantity:
    if depth > _DEEPEST:
        raise InvalidRequest(f"formula {formula[:80]!r}... is nested more than {_DEEPEST} deep")
    operands: list[ast.expr]
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return Quantity(float(number))
        case ast.Name() | ast.Attribute():
            return value(_dotted(node, formula))
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div(), right=right):
            operands = [left, right]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            operands = [operand]
        case ast.Call(func=ast.Name(id=function), args=list(operands), keywords=[]) if (
            function in _FUNCTIONS and operands
        ):
            pass
        case _:
            raise InvalidRequest(
                f"formula {formula!r} has {ast.unparse(node)!r}: it may have + - * / ( ), numbers, names, "
                + ", ".join(_FUNCTIONS)
            )
    return apply(node, [_walk(operand, formula, value, apply, depth + 1) for operand in operands])


def _dotted(node: ast.expr, formula: str) -> str:
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=inner, attr=name):
            return f"{_dotted(inner, formula)}.{name}"
        case _:
            raise InvalidRequest(
                f"formula {formula!r} has {ast.unparse(node)!r}, needs a name before the dot"
            )
