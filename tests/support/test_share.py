"""Which combinations of parameters run by default."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import share
from tests.support.rig import Pool
from tests.support.share import combination, each_value_once, spread, values_once

SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@given(SIZES)
def test_every_value_is_in_a_case_and_no_case_is_there_for_none(sizes: list[int]) -> None:
    cases = list(product(*map(range, sizes)))
    chosen = [cases[i] for i in each_value_once(cases)]
    for position, size in enumerate(sizes):
        assert {case[position] for case in chosen} == set(range(size))
    assert len(chosen) == max(sizes)  # of all combinations as many as the longest parameter has values


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 4)), unique=True))
def test_of_any_combinations(cases: list[tuple[int, ...]]) -> None:
    chosen = [cases[i] for i in each_value_once(cases)]
    for position in range(3):
        assert {case[position] for case in chosen} == {case[position] for case in cases}


def test_values_meet_others_each_time() -> None:
    cases = list(product(range(3), range(3), range(12)))
    chosen = {cases[i][:2] for i in each_value_once(cases)}
    assert len(chosen) == 9, "of 12 cases all 9 pairs of the short parameters"


def test_a_list_of_cases_may_be_thinned(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [("a", 1), ("a", 2), ("b", 2)]
    monkeypatch.setattr(share, "FULL", False)
    assert values_once(cases) == [("a", 1), ("b", 2)]
    monkeypatch.setattr(share, "FULL", True)
    assert values_once(cases) == cases


@pytest.mark.parametrize("one", ["a", "b"])
@pytest.mark.parametrize(("two", "three"), [(1, 1), (1, 2), (2, 2)])
def test_what_one_mark_lists_is_one_value(request: pytest.FixtureRequest, one: str, two: int, three: int) -> None:
    assert set(combination(request.node)) == {(id(one),), (id(two), id(three))}


def test_all_run_with_hsdp_full(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    items = request.session.items
    monkeypatch.setattr(share, "FULL", True)
    assert spread(items) == (items, [])


def test_a_test_on_ranks_takes_ranks(pool2: Pool, request: pytest.FixtureRequest) -> None:
    assert share.takes_ranks(request.node)
