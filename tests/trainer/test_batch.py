"""Rows of a batch: every action token is predicted once, from its own predecessors and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollmill.models.attention import AttentionOptions
from rollmill.trainer.batch import MicroBatch, build_micro_batches, build_token_table
from rollmill.types import Experience, ExperienceSource

CPU, META = torch.device("cpu"), torch.device("meta")


def made(id: str, group: str, prompt: list[int], own: list[int], acting: str = "", **keys: Any) -> Experience:
    """`acting` marks with x which of the own tokens are the policy's; by default all."""
    ids = np.array([*prompt, *own], np.int32)
    mask = np.array([*[False] * len(prompt), *(mark == "x" for mark in acting or "x" * len(own))])
    numbers = np.arange(len(ids))
    return Experience(id, "t", group, ids, mask, -numbers.astype(np.float32), numbers.astype(np.int32) + 10, **keys)


def sizes(rows: list[MicroBatch]) -> list[int]:
    return [row.input_ids.numel() for row in rows]


def seen(row: MicroBatch) -> torch.Tensor:
    """bool [T, T]: what each place of the row attends to. Equal scores give each its share of a value of its own."""
    length = row.input_ids.numel()
    nothing, own = torch.zeros(1, 1, length, length), torch.eye(length)[None, None]
    return row.attention.attend(nothing, nothing, own, AttentionOptions(scaling=1.0))[0, :, 0] > 0


def test_the_table_has_every_action_token_that_something_comes_before() -> None:
    batch = [
        made("a", "g", [], [5, 6, 7], temperature=0.5),  # the first token has no predecessor
        made("b", "g", [5, 6], [7, 8, 9], "x.x", temperature=0.25),
        made("c", "h", [5], [6], ".", temperature=2.0),
        made("d", "x", [5], [6], temperature=0.5, source=ExperienceSource.EXPERT),
    ]
    table = build_token_table(batch, CPU)
    assert table.target.tolist() == [6, 7, 7, 9, 6]
    assert table.rollout_logprob.tolist() == [-1, -2, -2, -4, -1]
    assert table.version.tolist() == [11, 12, 12, 14, 11]
    assert table.temperature.tolist() == [0.5, 0.5, 0.25, 0.25, 1.0]  # demonstrations are learned at 1
    assert table.experience.tolist() == [0, 0, 1, 1, 3]
    assert table.imitated.tolist() == [False, False, False, False, True]
    assert table.offsets == [0, 2, 4, 4, 5]
    assert [each.tolist() for each in table.positions] == [[1, 2], [2, 4], [], [1]]
    assert table.lengths.tolist() == [2, 2, 0, 1]
    assert build_token_table(batch[:3], CPU).lengths.tolist() == [2, 2, 0]
    nobody = build_token_table([], CPU)
    assert (nobody.target.dtype, nobody.rollout_logprob.dtype, len(nobody.target)) == (torch.int64, torch.float32, 0)


def test_a_row_by_hand() -> None:
    """Two completions of one prompt and one of another: prompts first, then what follows, the longest of each first."""
    batch = [
        made("a", "g", [1, 2, 3], [4, 5]),
        made("b", "g", [1, 2, 3], [6, 7, 8, 9, 9, 9, 9]),
        made("c", "h", [1, 2], [3, 4, 5], "x.x"),
    ]
    [row] = build_micro_batches(batch, build_token_table(batch, CPU), [0, 1, 2], 100, CPU)
    # what the last action token would predict is not asked for
    assert row.input_ids.tolist() == [[*(1, 2, 3, 4), *(1, 2, 3), *(6, 7, 8, 9, 9, 9), 4]]
    assert row.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7, 8, 3]]
    home = {batch[i].id: n for n, i in enumerate(row.experiences)}
    places = {}
    for place, token, sequence in zip(row.rows.tolist(), row.tokens.tolist(), row.sequence.tolist(), strict=True):
        places[token] = (place, sequence)
    a, b, c = (home[name] for name in "abc")
    own = {2 + n: (place, b) for n, place in enumerate([6, 7, 8, 9, 10, 11, 12])}
    assert places == {0: (6, a), 1: (13, a), **own, 9: (1, c), 10: (3, c)}
    of = dict(zip(row.sequence.tolist(), row.group.tolist(), strict=True))
    assert of[home["a"]] == of[home["b"]] != of[home["c"]]
    assert set(row.group.tolist()) == {0, 1}


def test_recorded_experts_lie_beside_their_tokens() -> None:
    """A shared prompt has those of its first completion; -1 stands for a token without a record."""

    def chosen(tokens: int, first: int, shape: tuple[int, int] = (2, 1)) -> np.ndarray[Any, np.dtype[np.int16]]:
        return (first + np.arange(tokens * shape[0] * shape[1])).reshape(tokens, *shape).astype(np.int16)

    batch = [
        made("a", "g", [1, 2, 3], [4, 5, 6], routing=chosen(6, 0)),
        made("b", "g", [1, 2, 3], [7, 8], routing=chosen(4, 20)),
        made("c", "h", [1, 2], [3, 4, 5]),
        made("d", "i", [4, 2], [3, 4], routing=chosen(3, 40, (1, 1))),
        made("e", "j", [5, 2], [3, 4, 5], routing=chosen(2, 60)),
    ]
    [row] = build_micro_batches(batch, build_token_table(batch, CPU), range(5), 100, CPU, routing=(2, 1))
    assert row.routing is not None
    assert (row.routing.shape, row.routing.dtype) == ((row.input_ids.numel(), 2, 1), torch.int16)
    found = list(zip(row.input_ids[0].tolist(), row.routing[:, :, 0].tolist(), strict=True))
    none = [-1, -1]
    assert found == [
        *((1, none), (2, none), (3, none), (4, none)),
        *((5, [60, 61]), (2, [62, 63]), (3, none), (4, none)),
        *((1, [0, 1]), (2, [2, 3]), (3, [4, 5])),
        *((4, none), (2, none), (3, none)),
        *((4, [6, 7]), (5, [8, 9]), (7, [26, 27])),
    ]
    for unknown in (batch[2:4], [made("f", "k", [1, 2], [3, 4], routing=chosen(0, 0))]):
        [row] = build_micro_batches(
            unknown, build_token_table(unknown, CPU), range(len(unknown)), 100, CPU, routing=(2, 1)
        )
        assert row.routing is None
    for one in (chosen(1, 0), chosen(3, 0)):  # one token is enough, and the last need not be known
        known = [made("f", "k", [1, 2], [3, 4], routing=one), made("g", "l", [3], [4, 5], routing=chosen(0, 0))]
        [row] = build_micro_batches(known, build_token_table(known, CPU), range(2), 100, CPU, routing=(2, 1))
        assert row.routing is not None


def test_what_follows_prompts_lies_longest_first_whatever_the_prompt() -> None:
    """So that segments of similar length lie side by side."""
    long = list(range(20))
    batch = [made("a", "g", long, [5] * 2), made("b", "g", long, [5] * 3)]
    batch += [made("c", "h", [4], [5] * 4), made("d", "h", [4], [5] * 6)]
    [row] = build_micro_batches(batch, build_token_table(batch, CPU), range(4), 100, CPU)
    starts = [[*range(20)], [0], [1, 2, 3, 4, 5], [1, 2, 3], [20, 21], [20]]
    assert row.position_ids[0].tolist() == sum(starts, [])  # noqa: RUF017


def test_tokens_of_a_source_are_those_of_its_experiences() -> None:
    batch = [
        made("a", "g", [1], [4, 5, 6, 7]),
        made("x", "x", [2], [6, 7, 8], source=ExperienceSource.EXPERT),
        made("b", "h", [3], [9]),
        made("c", "g", [1], [4]),
    ]
    sources = [each.source for each in batch]
    [row] = build_micro_batches(batch, build_token_table(batch, CPU), range(4), 100, CPU)
    found = {source: sorted(row.tokens[row.of_source(source, sources)].tolist()) for source in ExperienceSource}
    assert found == {
        ExperienceSource.ROLLOUT: [0, 1, 2, 3, 7, 8],
        ExperienceSource.EXPERT: [4, 5, 6],
        ExperienceSource.PREFERENCE: [],
    }


@st.composite
def batches(draw: st.DrawFn) -> list[Experience]:
    """Completions of few prompts, with holes, of a few groups; some without an action token."""
    prompts = [[1], [1, 2], [2, 1], [1, 2, 2, 1]]
    count, batch = draw(st.integers(1, 7)), []
    for n in range(count):
        own = draw(st.lists(st.integers(1, 2), min_size=1, max_size=6))
        acting = "".join(draw(st.lists(st.sampled_from("xx."), min_size=len(own), max_size=len(own))))
        batch.append(made(f"e{n}", draw(st.sampled_from("gh")), draw(st.sampled_from(prompts)), own, acting))
    return batch


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(batches(), st.integers(1, 30), st.booleans(), st.booleans(), st.integers(1, 2))
def test_every_action_token_is_predicted_once_from_its_own_predecessors(
    batch: list[Experience], budget: int, share: bool, keep: bool, ranks: int
) -> None:
    table, found = build_token_table(batch, CPU), []
    options: dict[str, Any] = {"share_prefixes": share, "keep_groups": keep, "ranks": ranks}
    for rank in range(ranks):
        for row in build_micro_batches(batch, table, range(len(batch)), budget, CPU, rank=rank, **options):
            visible, position = seen(row), row.position_ids[0]
            for place, token, sequence in zip(row.rows, row.tokens, row.sequence, strict=True):
                number = row.experiences[int(sequence)]
                at = int(table.positions[number][int(token) - table.offsets[number]])
                assert position[visible[place]].sort().values.tolist() == list(range(at))
                order = visible[place].nonzero()[:, 0]
                order = order[position[order].argsort()]
                assert row.input_ids[0, order].tolist() == batch[number].token_ids[:at].tolist()
                found.append(int(token))
            names = {batch[i].group for i in row.experiences}
            assert set(row.group.tolist()) == set(range(len(names)))
    assert sorted(found) == list(range(len(table.target)))


def test_only_the_chosen_are_in_rows() -> None:
    batch = [made(str(n), "g", [1, 2], [n, n]) for n in range(5)]
    rows = build_micro_batches(batch, build_token_table(batch, CPU), [1, 3], 100, CPU)
    assert [sorted(row.experiences) for row in rows] == [[1, 3]]
    assert build_micro_batches(batch, build_token_table(batch, CPU), [], 100, CPU) == []


def test_prompts_are_shared_where_they_are_the_same_and_only_up_to_the_first_action() -> None:
    batch = [
        made("a", "g", [1, 2, 3], [4, 5]),
        made("b", "h", [1, 2, 3], [6, 7]),  # another group, the same prompt
        made("c", "g", [1, 2], [3, 4, 5]),  # the same tokens, but the third is its own
    ]
    table = build_token_table(batch, CPU)
    assert sizes(build_micro_batches(batch, table, range(3), 100, CPU)) == [3 + 1 + 1 + 4]
    assert sizes(build_micro_batches(batch, table, range(3), 100, CPU, share_prefixes=False)) == [4 + 4 + 4]


def test_a_family_is_cut_where_it_does_not_fit_and_each_piece_has_the_prompt() -> None:
    """A prompt of 4 and own parts of 3, 3, 2, 2 and 1 tokens, of which the last is no input: 4 + 2 + 2 + 1 fit in 9."""
    batch = [made(str(n), "g", [1, 2, 3, 4], [5] * length) for n, length in enumerate((3, 2, 1, 3, 2))]
    table = build_token_table(batch, CPU)
    rows = build_micro_batches(batch, table, range(5), 9, CPU)
    assert sorted(sizes(rows)) == [5, 9]
    assert sizes(build_micro_batches(batch, table, range(5), 10, CPU)) == [10]
    assert sorted(sizes(build_micro_batches(batch, table, range(5), 5, CPU))) == [5, 5, 6, 6]
    assert sorted(sizes(build_micro_batches(batch, table, range(5), 1, CPU))) == [4, 5, 5, 6, 6]
    assert sizes(build_micro_batches(batch, table, range(5), 1, CPU, keep_groups=True)) == [10]


def test_groups_kept_whole_share_a_prompt_where_it_is_the_same() -> None:
    batch = [
        made(str(n), name, prompt, [5, 6]) for n, (name, prompt) in enumerate(zip("ghgh", [[1, 2]] * 4, strict=True))
    ]
    table = build_token_table(batch, CPU)
    rows = build_micro_batches(batch, table, range(4), 4, CPU, keep_groups=True)
    assert sizes(rows) == [4, 4]
    assert sorted(sorted(row.experiences) for row in rows) == [[0, 2], [1, 3]]
    assert sizes(build_micro_batches(batch, table, range(4), 6, CPU, keep_groups=True)) == [6]
    apart = build_micro_batches(batch, table, range(4), 6, CPU, keep_groups=True, share_prefixes=False)
    assert sizes(apart) == [6, 6]


def test_rows_on_a_cpu_hold_2048_tokens_where_no_family_is_cut() -> None:
    """And all of the budget elsewhere."""
    few = [made(str(n), str(n), [n, 1], [5] * 700) for n in range(4)]
    table = build_token_table(few, CPU)
    assert sorted(sizes(build_micro_batches(few, table, range(4), 10_000, CPU))) == [1402, 1402]
    assert sizes(build_micro_batches(few, table, range(4), 10_000, META)) == [4 * 701]
    assert sizes(build_micro_batches(few, table, range(4), 1000, CPU)) == [701] * 4
    family = [made(str(n), "g", [1, 1], [5] * 700) for n in range(4)]
    assert sizes(build_micro_batches(family, build_token_table(family, CPU), range(4), 10_000, CPU)) == [2 + 4 * 699]
    exactly = [made(str(n), str(n), [n, 1], [5] * 1023) for n in range(2)]
    assert sizes(build_micro_batches(exactly, build_token_table(exactly, CPU), range(2), 10_000, CPU)) == [2048]
    more = [made(str(n), str(n), [n, 1], [5] * (1023 + n)) for n in range(2)]
    assert sorted(sizes(build_micro_batches(more, build_token_table(more, CPU), range(2), 10_000, CPU))) == [1024, 1025]
    alone = build_micro_batches(family, build_token_table(family, CPU), range(4), 10_000, CPU, share_prefixes=False)
    assert sorted(sizes(alone)) == [1402, 1402]


def test_ranks_make_equally_many_passes() -> None:
    """Rows of nothing are a token of which nothing is predicted."""
    batch = [made("a", "g", [1, 2], [3, 4])]
    table = build_token_table(batch, CPU)
    assert [sizes(build_micro_batches(batch, table, [0], 9, CPU, ranks=2, rank=rank)) for rank in (0, 1)] == [[3], []]
    [row] = build_micro_batches(batch, table, [0], 9, CPU, ranks=2, rank=1, even=True)
    assert (row.experiences, row.input_ids.tolist(), row.position_ids.tolist()) == ([], [[0]], [[0]])
    assert all(
        each.shape == (0,) and each.dtype == torch.int64 for each in (row.rows, row.tokens, row.sequence, row.group)
    )
    assert seen(row).tolist() == [[True]]
