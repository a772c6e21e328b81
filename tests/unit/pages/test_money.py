"""Amounts of money in tables: no space at which a narrow line would break them."""

from meshwright.pages.tables.budget_table import money


def test_an_amount_is_one_word() -> None:
    assert [money(amount) for amount in (152_969.0, 1.59e6, 2e9, 12.0)] == ["153k", "1.59M", "2B", "12"]
