"""The report: what it says, that it needs no network, and that hostile texts stay texts."""

import math
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rllib_llm.compare import CurvesError, CurveWriter, read_curves
from rllib_llm.compare.report import Options, write_report
from tests.compare.raw import REWARD, noise, rising, row, write

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
THREE = {
    "bf16": lambda i, s: rising(i) + noise(i, s),
    "mixed": lambda i, s: rising(i, final=0.6) + noise(i, s),
    "unified": lambda i, s: rising(i) + noise(i, s + 9, 0.001),
}


def said(report, part):
    """The one sentence of the summary with this part."""
    [sentence] = [sentence for sentence in report.summary if part in sentence]
    return sentence


@pytest.fixture(scope="module")
def five(tmp_path_factory):
    """(file, report) of three arms with five seeds; "mixed" has a mismatch and ends lower."""
    directory = tmp_path_factory.mktemp("five")
    write(directory, THREE, k3={"mixed": 0.01})
    return write_report(directory)


def test_five_seeds_rank_what_differs_and_only_that(five):
    """The lower arm is named below both others, with p; the two equal ones are not put in an order."""
    _, report = five
    assert report.ranking.enough
    assert {(p.first, p.second) for p in report.ranking.told_apart} == {
        ("bf16", "mixed"),
        ("mixed", "unified"),
    }
    assert "bf16 ends above mixed: 0.8" in said(report, "bf16 ends above")
    assert not any("unified ends above bf16" in s or "bf16 ends above unified" in s for s in report.summary)
    assert said(report, "unified against bf16").endswith("within 1 %.")
    assert said(report, "mixed against bf16").endswith("a difference of more than 1 %.")


def test_three_seeds_give_no_order(tmp_path):
    """Whatever the difference, three seeds of three arms are too few, and the report says how many are needed."""
    write(tmp_path, THREE, seeds=3)
    _, report = write_report(tmp_path)
    assert report.summary[0].startswith("Too few seeds to rank 3 arms: with 3 per arm")
    assert "At least 5 seeds per arm are needed" in report.summary[0]
    assert not any("ends above" in sentence for sentence in report.summary)
    assert "as far as 3 runs can say" in said(report, "unified against bf16")


def test_mismatch_that_is_zero_is_said_to_be_exactly_zero(five):
    """Exact zeros are counted; a mismatch that is there is given as a number."""
    _, report = five
    assert (
        said(report, "unified: train–rollout")
        == "unified: train–rollout mismatch exactly 0 in all 200 measured iterations."
    )
    assert said(report, "mixed: mismatch k3").startswith("mixed: mismatch k3 0.01000 on average")


def test_a_mismatch_that_is_not_finite_is_counted(tmp_path):
    """What no axis can show is said in words."""
    writer = CurveWriter(tmp_path)
    for iteration in range(1, 9):
        writer.row("a", 0, iteration, row(0.5) | {"mismatch/k3": math.inf if iteration > 5 else 0.5})
    _, report = write_report(tmp_path)
    assert said(report, "not finite") == "a: mismatch k3 was not finite in 3 iterations."


def test_divergence_is_named_by_arm_and_seed(tmp_path):
    """A collapsed and a failed run are counted under their arm; without any the report says that none diverged."""

    def falling(iteration, seed):
        return rising(iteration) - (0.3 if seed == 2 and iteration > 25 else 0.0) + noise(iteration, seed)

    writer = write(tmp_path, {"bf16": THREE["bf16"], "mixed": falling})
    writer.status("mixed", 4, "failed", "RuntimeError: CUDA out of memory")
    file, report = write_report(tmp_path)
    sentence = said(report, "runs diverged")
    assert sentence.startswith("mixed: 2 of 5 runs diverged (seed 2 collapsed at iteration ")
    assert "seed 4 failed at iteration 40" in sentence
    assert "RuntimeError: CUDA out of memory" in file.read_text(encoding="utf-8")
    assert "No run diverged." not in report.summary


class Page(HTMLParser):
    """Tags, attributes and the text of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.texts, self.open = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "use", "path", "rect", "link", "br", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_data(self, data):
        self.texts.append(data)


def test_the_page_stands_alone(five):
    """No script, no address that a browser would fetch, every element closed, below 1 MB, both colour schemes."""
    text = five[0].read_text(encoding="utf-8")
    page = Page(text)
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    fetched = [value for name, value in page.attributes if name in ("src", "href", "xlink:href", "action")]
    assert all(value.startswith("#") for value in fetched)
    assert not re.findall(r"url\((?!#)", text)
    assert page.open == []
    assert len(text) < 1_000_000
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text


def test_figures_take_their_colours_from_the_page(five):
    """No colour of matplotlib is left in a figure: a dark page would hide it. Every figure is named for a reader."""
    text = five[0].read_text(encoding="utf-8")
    svgs = re.findall(r"<svg.*?</svg>", text, flags=re.S)
    assert len(svgs) >= 9
    for svg in svgs:
        assert re.findall(r"#[0-9a-f]{6}\b", svg.replace("#ffffff", "")) == []
        assert 'role="img" aria-label="' in svg
        assert "currentColor" in svg
        assert "mathdefault" not in svg  # TeX where no TeX is read
        assert not re.search(r'<svg[^>]*\swidth="', svg)


def test_texts_from_results_are_not_markup(five, tmp_path):
    """A name from a results file that looks like HTML is shown, not interpreted, in tables and in figures."""
    assert "&lt;b&gt;GPU &amp; co&lt;/b&gt;" in five[0].read_text(encoding="utf-8")
    writer = CurveWriter(tmp_path)
    for iteration in range(1, 5):
        writer.row("<script>x</script> $a_b$", 0, iteration, row(0.5))
    file, _ = write_report(tmp_path)
    page = Page(file.read_text(encoding="utf-8"))
    assert "script" not in page.tags
    assert "<script>x</script> $a_b$" in page.texts


def test_the_same_results_give_the_same_bytes(five):
    """A report can be rebuilt and compared."""
    before = five[0].read_bytes()
    write_report(five[0].parent)
    assert five[0].read_bytes() == before


def test_sections_follow_what_was_measured(tmp_path):
    """A reward alone makes a report, without sections about what nobody measured."""
    (tmp_path / "curves.csv").write_text(
        f"arm,seed,iteration,{REWARD}\n"
        + "".join(f"a,{s},{i},{i / 10}\n" for s in range(2) for i in range(1, 9))
    )
    text = write_report(tmp_path)[0].read_text(encoding="utf-8")
    titles = re.findall(r"<h2>(.*?)</h2>", text)
    assert titles == [
        "Final reward",
        "Reward over training",
        "Runs and divergence",
        "Cost to reach a reward",
        "Arms",
        "Rules",
        "Environment",
    ]
    assert "These results do not say where they were made." in text


def test_an_incomplete_comparison_says_so(tmp_path):
    """Cells that are under way or have not begun are counted: a report can be made at any time."""
    writer = CurveWriter(tmp_path)
    for iteration in range(1, 6):
        writer.row("a", 0, iteration, row(0.5))
    writer.describe(planned={"arms": ["a", "b"], "seeds": [0, 1], "iterations": 9})
    _, report = write_report(tmp_path)
    sentence = "Not all runs are complete: 1 under way, 3 of those planned not begun."
    assert said(report, "Not all runs") == sentence


def test_arms_without_a_finite_reward_are_named_not_dropped(tmp_path):
    """Two arms are not called one, and an arm of NaN does not vanish from the ranking unsaid."""
    arms = {**THREE, "nan": lambda i, s: math.nan}
    write(tmp_path, arms, seeds=4)
    report = write_report(tmp_path)[1]
    assert said(report, "Not ranked").endswith("that counts: nan.")
    write(tmp_path / "all", {"a": arms["nan"], "b": arms["nan"]}, seeds=2)
    report = write_report(tmp_path / "all", Options(baseline="a"))[1]
    assert said(report, "nothing to rank") == "There is no arm with a final reward: nothing to rank."


def test_results_without_a_plan_are_not_called_incomplete(tmp_path):
    """Where compare.json says nothing of runs, nothing is known of their end."""
    write(tmp_path, THREE, seeds=1)
    (tmp_path / "compare.json").unlink()
    report = write_report(tmp_path)[1]
    assert said(report, "complete").startswith("Whether the runs are complete is not known")


def test_position_is_weighted_by_tokens(five):
    """k3 by position is the mean over tokens: 0.01 and 0.02 in the two buckets of "mixed", 0 for the others."""
    from rllib_llm.compare.sections import _at_position

    runs = read_curves(five[0].parent).of("mixed")
    assert _at_position(runs, "0-31") == pytest.approx(0.01)
    assert _at_position(runs, "32-127") == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (Options(metric="reward"), rf"metric = 'reward' is in no row\. Measured: {REWARD}"),
        (Options(baseline="fp64"), r"baseline = 'fp64' is no arm of these results \(bf16, mixed, unified\)"),
        (Options(last=0, margin=2.0), r"2 problems(.|\n)*last = 0(.|\n)*margin = 2\.0"),
    ],
)
def test_options_that_fit_no_result_are_refused(five, options, match):
    """What is asked for and not there is named beside what is."""
    with pytest.raises(CurvesError, match=match):
        write_report(five[0].parent, options)


def test_the_committed_example_says_what_its_raw_results_say(tmp_path):
    """benchmarks/results/compare_quickstart/summary.md is what a report of the curves beside it says."""
    folder = ROOT / "benchmarks" / "results" / "compare_quickstart"
    for name in ("curves.csv", "compare.json"):
        shutil.copy(folder / name, tmp_path)
    _, report = write_report(tmp_path)
    written = (folder / "summary.md").read_text(encoding="utf-8").splitlines()
    assert [f"* {sentence}" for sentence in report.summary] == written
