"""The view of a run below a notebook's cell."""

from __future__ import annotations

import numpy as np
from support.run_factory import STAGES, experience, training_metrics

from rollmill.apps.studio.notebook import NotebookView


def test_the_view_shows_progress_curves_and_completions_as_text() -> None:
    rng = np.random.default_rng(0)
    view = NotebookView(3)
    view.start("sums", STAGES)
    for step in range(1, 26):
        view.step(training_metrics(rng, step), [experience(rng, "t", 0, "<b>2+2</b>", "<script>4</script>", 1.0)])
    view.message("a <i>message</i>")
    page = view.html()
    assert "<b>sums</b> step 25 of 60" in page
    assert page.count("<svg") == 3  # reward, loss and KL; nothing was evaluated
    assert "&lt;script&gt;4&lt;/script&gt;" in page
    assert "a &lt;i&gt;message&lt;/i&gt;" in page
    assert "<script" not in page


def test_an_evaluation_is_a_curve() -> None:
    view = NotebookView(0)
    view.evaluation({"step": 1, "eval/greedy": 0.5})
    assert 'aria-label="Accuracy"' in view.html()
    assert "<table" not in view.html()
