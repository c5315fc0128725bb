"""The quantities that an input file's sections give, checked against `schema`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvtier.errors import InvalidRequest
from kvtier.plan import schema
from kvtier.plan.units import Quantity, measured, quantity, unit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True)
class Given:
    """One input: its name on the sheet, and where it is from."""

    figure: str
    quantity: Quantity
    unit: str
    source: str


def read_all(
    section: Mapping[str, Any],
    where: str,
    fields: Mapping[str, schema.Field],
    currency: str,
    others: Sequence[str] = (),
) -> list[Given]:
    """The quantities that a section gives."""
    schema.known(section, where, fields, others)
    return [
        read_one(section[name], name, where, kind, currency)
        for name, kind in fields.items()
        if name in section
    ]


def read_one(value: Any, name: str, where: str, kind: schema.Field, currency: str) -> Given:
    """One field's quantity. Raises InvalidRequest for another unit, or a value that it may not have."""
    unit_text, short = kind.unit.format(currency=currency), kind.short.format(currency=currency)
    try:
        if kind.unit == "money":
            found, unit_text = _amount(value, currency)
        else:
            found = quantity(value, unit_text, short)
    except InvalidRequest as error:
        raise InvalidRequest(f"{name} in {where}: {error}") from error
    limit = kind.above if kind.above is not None else 0.0
    given = found.value / unit(unit_text).factor
    if given < limit or (kind.above is not None and given == limit) or (kind.most or given) < given:
        least = f"above {kind.above:g}" if kind.above is not None else "of at least 0"
        most = "" if kind.most is None else f" and at most {kind.most:g}"
        raise InvalidRequest(f"{name} in {where} is {value!r}, needs a value {least}{most}")
    return Given(kind.figure, found, unit_text, f"{name} in {where}")


def currency_name(text: str) -> str:
    """The currency that `text` names. Raises InvalidRequest for none."""
    dimensions = unit(text).dimensions
    if dimensions != ((text, 1),) or len(text) != 3:
        raise InvalidRequest(f"currency is {text!r}, needs three capital letters such as 'USD'")
    return text


def _amount(value: Any, currency: str) -> tuple[Quantity, str]:
    """An amount in any currency, and which: a bare number is in the plan's."""
    if not isinstance(value, str):
        return quantity(value, currency), currency
    found, given = measured(value)
    if given.text == "1":
        return quantity(found.value, currency), currency
    return found, currency_name(given.text)
