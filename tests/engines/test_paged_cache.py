"""Pages of the KV cache: who holds them, and who writes to them. `tests/simulated_gpu` tests what is computed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.engines.native.kv_cache import CacheFull
from rollmill.engines.native.paged_cache import PagedCache, PagedEntry, page_count
from rollmill.models.attention import PAGE, AttentionOptions, CachedLayer

LAYERS = [CachedLayer(1, 8, 8, AttentionOptions(scaling=1.0))]


def cache_of(pages: int | None) -> PagedCache:
    size = 2 * PAGE * 8 * 2
    return PagedCache(LAYERS, torch.bfloat16, torch.device("cpu"), None if pages is None else pages * size)


@given(data=st.data(), pages=st.sampled_from([None, 6, 15]))
@settings(max_examples=60, deadline=None)
def test_pages_are_held_by_those_who_use_them(data: Any, pages: int | None) -> None:
    cache = cache_of(pages)
    prompts: list[PagedEntry] = []
    rows: list[PagedEntry] = []
    kept: list[tuple[list[int], int]] = []

    def one(of: list[Any]) -> Any:
        return data.draw(st.sampled_from(of))

    for _ in range(30):
        action = one(["prompt", "start", "grow", "finish", "forget", "next turn", "drop"])
        try:
            if action == "prompt":
                prompts.append(cache.prompt(length := data.draw(st.integers(1, 700))))
                prompts[-1].length = length
            elif action == "start" and prompts:
                rows += cache.completions([one(prompts) for _ in range(data.draw(st.integers(1, 3)))])
            elif action == "grow" and rows:
                row = one(rows)
                cache.reserve([row], [more := data.draw(st.integers(1, 300))])
                row.length += more
            elif action == "finish" and rows:
                rows.remove(row := one(rows))
                kept.append((cache.keep(row, row.length)[0], row.offset + row.length))
                cache.remove([row])
            elif action == "forget" and prompts:
                prompts.remove(prompt := one(prompts))
                cache.remove([prompt])
            elif action == "next turn" and kept:
                turn, length = one(kept)
                entry = cache.prompt(length + 10)
                last = data.draw(st.booleans())
                cache.adopt(turn, entry, last=last)
                entry.length = length + 10
                prompts.append(entry)
                if last:
                    kept.remove((turn, length))
                    cache.release(turn)
            elif action == "drop" and kept:
                kept.remove(turn := one(kept))
                cache.release(turn[0])
        except CacheFull:
            assert pages is not None
        held = Counter(page for entry in (*prompts, *rows) for page in entry.pages)
        held.update(page for turn, _ in kept for page in turn)
        assert {page: uses for page, uses in enumerate(cache._uses) if page and uses} == held
        assert cache.used == len(held) * cache.page_bytes
        assert pages is None or len(held) <= pages
        assert cache.entries() == len(prompts) + len(rows)
        writers = Counter(entry.pages[(entry.offset + entry.length) // PAGE] for entry in rows if _has_room(entry))
        assert all(count == 1 for count in writers.values())
        assert all(len(entry.pages) >= page_count(entry.offset + entry.length) for entry in (*prompts, *rows))


def _has_room(entry: PagedEntry) -> bool:
    return (entry.offset + entry.length) // PAGE < len(entry.pages)


def test_fitting_counts_the_copies_of_the_page_in_which_a_prompt_ends() -> None:
    cache = cache_of(5)
    prompt = cache.prompt(PAGE + 7)
    prompt.length = PAGE + 7
    # the first one writes to the prompt's page; the next ones have a copy each, of 3 pages that are left
    assert cache.fitting([prompt] * 6, [1] * 6) == 4
    assert cache.fitting([prompt] * 6, [PAGE] * 6) == 2
    assert len(cache.completions([prompt] * 4)) == 4
    assert cache.fitting([prompt], [1]) == 0
    with pytest.raises(CacheFull):
        cache.completions([prompt])


def test_copies_have_the_tokens_of_the_prompt() -> None:
    cache = cache_of(None)
    prompt = cache.prompt(20)
    places = torch.arange(20) + prompt.pages[0] * PAGE
    tokens = torch.randn(1, 1, 20, 8, dtype=torch.bfloat16)
    cache.store(0, places, tokens, -tokens)
    prompt.length = 20
    first, second = cache.completions([prompt] * 2)
    assert first.pages == prompt.pages != second.pages
    assert torch.equal(cache.keys[0][second.pages[0], :20, 0], tokens[0, 0])
    assert torch.equal(cache.values[0][second.pages[0], :20, 0], -tokens[0, 0])
