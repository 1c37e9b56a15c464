"""This folder's tests notice defects of the CUDA path, planted into a copy of the source one at a time."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.thorough, pytest.mark.timeout(900), pytest.mark.usefixtures("simulated")]

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Defect:
    """In `file`, `old` (which is there once) becomes `new`; the test `noticed_by` then fails."""

    breaks: str
    file: str
    old: str
    new: str
    noticed_by: str


BF16 = "test_run_files.py::test_a_run_trains[bf16]"
WEIGHTS_BF16 = "test_run_files.py::test_a_run_trains[weights in bf16]"
DRAFTS = "test_run_files.py::test_a_run_trains[n-gram drafts]"
DRAWS = "test_engine.py::test_tokens_are_those_that_a_cpu_draws[plain]"
PAGES = "test_engine.py::test_completions_in_pages[shared heads]"
TURNS = "test_engine.py::test_conversations_in_pages[None]"
REPLAYS = "test_budgets.py::test_uniform_completions_are_decoded_by_replays[pages]"
REPLAYS_OF_BUCKETS = "test_budgets.py::test_uniform_completions_are_decoded_by_replays[buckets]"
TRAINING, TRAINING_PPO = (f"test_budgets.py::test_transfers_of_a_training_step[{each}]" for each in ("grpo", "ppo"))
ONE_TRANSFER = "test_budgets.py::test_several_arrays_are_one_transfer"
DEFECTS = [
    Defect(
        "a row's next page is its first one",
        "engines/native/paged_cache.py",
        "row[before:now] = entry.pages[before:now]",
        "row[before:now] = entry.pages[: now - before]",
        PAGES,
    ),
    Defect(
        "a step does not see its own tokens",
        "engines/native/paged_cache.py",
        "(whole[1] + 1).astype(np.int32)",
        "np.maximum(whole[1], 1).astype(np.int32)",
        PAGES,
    ),
    Defect(
        "a step sees a token that is not there",
        "engines/native/paged_cache.py",
        "(whole[1] + 1).astype(np.int32)",
        "(whole[1] + 2).astype(np.int32)",
        PAGES,
    ),
    Defect(
        "rows that fill up the batch write to a page of a row",
        "engines/native/paged_cache.py",
        "[*range(pages - 1, before - 1, -1), *self._free]",
        "[*range(pages - 1, before - 2, -1), *self._free]",
        "test_engine.py::test_rows_that_fill_up_the_batch_change_nothing[1]",
    ),
    Defect(
        "the table of pages is not sent again",
        "engines/native/paged_cache.py",
        "if version != self._written:",
        "if self._written < 0:",
        PAGES,
    ),
    Defect(
        "completions write to the same page",
        "engines/native/paged_cache.py",
        "            if rest and not parent.last_page_shared:\n",
        "            if rest:\n",
        PAGES,
    ),
    Defect(
        "a prompt's last page is not copied",
        "engines/native/paged_cache.py",
        "        self._copy(sources, targets)\n",
        "",
        PAGES,
    ),
    Defect(
        "equal conversations write to the same page",
        "engines/native/paged_cache.py",
        "shared = kept if last else kept[:-1]",
        "shared = kept",
        TURNS,
    ),
    Defect(
        "pages that are kept are given to others",
        "engines/native/paged_cache.py",
        "        for page in pages:\n            self._uses[page] += 1\n        return pages, len",
        "        return pages, len",
        TURNS,
    ),
    Defect(
        "a captured step reads pages where they were before the cache grew",
        "engines/native/paged_cache.py",
        "            self._moves = self._cache.moves\n            self.drop_captured()\n",
        "            self._moves = self._cache.moves\n",
        "test_engine.py::test_captured_steps_follow_the_cache",
    ),
    Defect(
        "a captured step reads weights where they were before",
        "engines/native/model_runner.py",
        "                self._places = places\n                self.decoder.drop_captured()\n",
        "                self._places = places\n",
        "test_engine.py::test_captured_steps_follow_the_weights",
    ),
    Defect(
        "a step of pages is captured with the inputs of an earlier one",
        "engines/native/paged_cache.py",
        "        context.write(tokens, positions, next_uniforms(rows), self._table, self._version)\n"
        "        if self.captures and",
        "        if self.captures and",
        PAGES,
    ),
    Defect(
        "uniform numbers stay on the host",
        "engines/native/decoder.py",
        "tokens, uniform_B = to_device([last, next_uniforms(rows)], self._device)",
        "[tokens], uniform_B = to_device([last], self._device), torch.from_numpy(next_uniforms(rows))",
        DRAWS,
    ),
    Defect(
        "a replayed step draws by the uniform numbers of the step before",
        "engines/native/decoder.py",
        "        logits, routing = self.run(context, self._graph, tokens, positions)\n",
        "        logits, routing = self.run(context, self._graph, tokens, positions)\n"
        "        before, self._before = getattr(self, '_before', uniform_B), uniform_B\n"
        "        uniform_B = before if self._graph and before.shape == uniform_B.shape else uniform_B\n",
        DRAWS,
    ),
    Defect(
        "a graph's input is not written",
        "engines/native/decoder.py",
        "        self._tokens.copy_(tokens_1B)\n",
        "",
        DRAWS,
    ),
    Defect(
        "a graph is replayed after its rows moved",
        "engines/native/decoder.py",
        "if context is None or self._moves != self._cache.moves() or context.full():",
        "if context is None:",
        DRAWS,
    ),
    Defect(
        "masks are kept from step to step",
        "engines/native/decode.py",
        "        self._layers = 0\n        self._masks.clear()\n",
        "        self._layers = 0\n",
        DRAWS,
    ),
    Defect(
        "a step with exact shapes is captured",
        "engines/native/decoder.py",
        "exact=not self.captures)",
        "exact=True)",
        DRAWS,
    ),
    Defect(
        "every change of rows captures a step",
        "engines/native/decoder.py",
        "CAPTURE_AFTER = 8",
        "CAPTURE_AFTER = 0",
        "test_budgets.py::test_conversations_are_decoded_with_few_captures[buckets]",
    ),
    Defect(
        "steps for each number of rows are captured",
        "engines/native/paged_cache.py",
        "max(LEAST_ROWS, 1 << (len(rows) - 1).bit_length())",
        "len(rows)",
        "test_budgets.py::test_conversations_are_decoded_with_few_captures[pages]",
    ),
    Defect(
        "decode steps are never captured",
        "engines/native/decoder.py",
        "self._unchanged >= CAPTURE_AFTER",
        "self._unchanged > 1 << 20",
        REPLAYS_OF_BUCKETS,
    ),
    Defect(
        "decode steps of pages are never captured",
        "engines/native/paged_cache.py",
        "self._steps[count] >= CAPTURE_AFTER",
        "self._steps[count] > 1 << 20",
        REPLAYS,
    ),
    Defect(
        "positions are replaced, which a graph does not see",
        "engines/native/decode.py",
        "self.positions_B.add_(1).clamp_(max=self._last_position)",
        "self.positions_B = (self.positions_B + 1).clamp(max=self._last_position)",
        DRAWS,
    ),
    Defect(
        "lengths are replaced, which a graph does not see",
        "engines/native/decode.py",
        "            piece.lengths_n += 1\n",
        "            piece.lengths_n = piece.lengths_n + 1\n",
        DRAWS,
    ),
    Defect(
        "a mask's indices are made on the host",
        "engines/native/decode.py",
        "            at = torch.arange(length, device=self.device)\n            hidden = at > piece",
        "            at = torch.arange(length)\n            hidden = at > piece",
        DRAWS,
    ),
    Defect(
        "each layer of a decode step waits for the device",
        "engines/native/decode.py",
        "        kv_heads = key.shape[1]\n        q_BKRD",
        "        assert bool(torch.isfinite(key).all())\n        kv_heads = key.shape[1]\n        q_BKRD",
        DRAWS,
    ),
    Defect(
        "fresh memory of the cache is read",
        "engines/native/kv_cache.py",
        "like.new_zeros(self.reserved",
        "like.new_empty(self.reserved",
        DRAWS,
    ),
    Defect(
        "sampled tokens are read one array after the other",
        "engines/native/sampler.py",
        "= to_host([token_P, logprob_P, kept_P, top_PK.int(), probs_PK])",
        "= (each.cpu() for each in (token_P, logprob_P, kept_P, top_PK.int(), probs_PK))",
        "test_budgets.py::test_transfers_of_a_decode_step[plain]",
    ),
    Defect(
        "uniform numbers of drafts stay on the host",
        "engines/native/draft_verifier.py",
        "uniform_P = torch.from_numpy(_uniforms(each, offsets)).to(logits_PV.device)",
        "uniform_P = torch.from_numpy(_uniforms(each, offsets))",
        DRAFTS,
    ),
    Defect(
        "arrays cross from pageable memory",
        "models/transfers.py",
        "dtype=torch.uint8, pin_memory=True)",
        "dtype=torch.uint8)",
        ONE_TRANSFER,
    ),
    Defect(
        "the host waits for each transfer to the device",
        "models/transfers.py",
        "packed.to(device, non_blocking=True)",
        "packed.to(device)",
        ONE_TRANSFER,
    ),
    Defect(
        "a pinned buffer is overwritten while it may still be read",
        "models/transfers.py",
        "    packed = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=True)\n",
        "    if starts[-1] > len(globals().get('_buffer', ())):\n"
        "        globals()['_buffer'] = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=True)\n"
        "    packed = globals()['_buffer'][: starts[-1]]\n",
        BF16,
    ),
    Defect(
        "arrays are packed for the host without their gaps",
        "models/transfers.py",
        ".view(torch.uint8), (0, gap))",
        ".view(torch.uint8), (0, 0 * gap))",
        BF16,
    ),
    Defect(
        "the flash kernel sees later tokens",
        "models/attention.py",
        "window_size=(-1 if window is None else window - 1, 0)",
        "window_size=(-1, -1)",
        BF16,
    ),
    Defect(
        "the flash kernel gets its segments in 64 bits",
        "models/attention.py",
        "columns = (np.array(starts, np.int32)",
        "columns = (np.array(starts, np.int64)",
        BF16,
    ),
    Defect(
        "the flash kernel gets heads of two sizes",
        "models/attention.py",
        "query.shape[-1] == size <= _WIDEST_HEAD",
        "size <= _WIDEST_HEAD",
        "test_engine.py::test_heads_whose_values_have_another_size",
    ),
    Defect(
        "the flash kernel runs on a GPU before Ampere",
        "models/attention.py",
        "torch.cuda.get_device_capability(value.device) >= (8, 0)",
        "torch.cuda.is_available()",
        "test_engine.py::test_a_gpu_before_ampere",
    ),
    Defect(
        "the optimizer draws from the CPU's generator",
        "trainer/stochastic_adamw.py",
        "torch.Generator(parameter.device)",
        "torch.Generator()",
        WEIGHTS_BF16,
    ),
    Defect(
        "the table of tokens stays on the host",
        "trainer/batch.py",
        "of_demonstrations = to_device(columns, device)",
        'of_demonstrations = to_device(columns, torch.device("cpu"))',
        BF16,
    ),
    Defect(
        "advantages stay on the host",
        "trainer/loss.py",
        "        advantage=found.advantage.to(device),\n",
        "        advantage=found.advantage,\n",
        BF16,
    ),
    Defect(
        "each metric of a micro-batch is read at once",
        "trainer/metrics.py",
        "        total = weight * values.sum(dtype=torch.float64)\n",
        "        total = weight * values.sum(dtype=torch.float64)\n        assert math.isfinite(float(total))\n",
        TRAINING,
    ),
    Defect(
        "the loss of each micro-batch is read at once",
        "trainer/update.py",
        "                loss.backward()\n            found.append(",
        "                loss.backward()\n            assert math.isfinite(float(loss))\n            found.append(",
        TRAINING,
    ),
    Defect(
        "a critic's loss of each micro-batch is read at once",
        "trainer/critic.py",
        "            total += loss.detach()\n",
        "            total += loss.detach().item()\n",
        TRAINING_PPO,
    ),
    Defect(
        "a file gets what lies where a temporary was",
        "offload/stores.py",
        "                host = storage_bytes(storage).cpu()  # named: `_buffer` keeps an address only\n"
        "                self._file.write(_buffer(host))\n",
        "                self._file.write(_buffer(storage_bytes(storage).cpu()))\n",
        "test_runs_compared.py::test_an_offloaded_run_computes_the_same[disk]",
    ),
    Defect(
        "all ranks use the first GPU",
        "trainer/distributed/worker.py",
        'torch.device("cuda", rank % torch.cuda.device_count())',
        'torch.device("cuda", 0)',
        "test_runs_compared.py::test_two_ranks_with_fsdp_compute_what_one_does",
    ),
]


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the source and of the tests."""
    folder = tmp_path_factory.mktemp("planted") / "copy"
    for name in ("src", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    for name in ("bench", "libs", "build"):  # build: the compiled simulation
        (folder / name).symlink_to(ROOT / name)
    return folder


@pytest.fixture
def planted(copied: Path, defect: Defect) -> Iterator[Path]:
    """The copy with the defect in it."""
    path = copied / "src/rollmill" / defect.file
    text = path.read_text()
    assert text.count(defect.old) == 1, f"{defect.file} has changed; plant this defect where its place is now"
    path.write_text(text.replace(defect.old, defect.new))
    yield copied
    path.write_text(text)


def passes(folder: Path, test: str) -> bool:
    """Run a test of this folder with the source of `folder`."""
    paths = [folder / "tests/support/simulated_cuda/site", folder / "src", *sorted(folder.glob("libs/*/src")), folder]
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", f"tests/simulated_gpu/{test}"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "ROLLMILL_"))}
    environment = kept | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "SIMULATED_CUDA_DEVICES": "2"}
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert ran.returncode in (0, 1), ran.stdout + ran.stderr  # no other error than a failed test
    assert "skipped" not in ran.stdout, ran.stdout
    return ran.returncode == 0


@pytest.mark.parametrize("test", sorted({each.noticed_by for each in DEFECTS}))
def test_a_copy_without_defect_passes(test: str, copied: Path) -> None:
    assert passes(copied, test)


@pytest.mark.parametrize("defect", [pytest.param(each, id=each.breaks) for each in DEFECTS])
def test_a_defect_is_noticed(defect: Defect, planted: Path) -> None:
    assert not passes(planted, defect.noticed_by)
