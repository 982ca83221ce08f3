"""Exercises: what to build, hints, and the tests that a solution must pass.

An exercise NAME has a text, NAME.md, and tests, check_NAME.py. A chapter shows some of
them by `exercise_list`.
"""

from pathlib import Path
from typing import NamedTuple

from nanopaged.tour.guide.markdown import Html, Renderer
from nanopaged.tour.guide.source import code_block, fold, highlight

FOLDER = Path(__file__).parent


class Exercise(NamedTuple):
    name: str
    minutes: int  # about
    files: tuple[str, ...]  # of the engine, where a solution changes something

    @property
    def text(self) -> str:
        return (FOLDER / f"{self.name}.md").read_text(encoding="utf-8")

    @property
    def test(self) -> str:
        """The test file, which a learner copies into tests/."""
        return (FOLDER / f"check_{self.name}.py").read_text(encoding="utf-8")


EXERCISES = [
    Exercise("logit_bias", 30, ("config.py", "llm.py", "sampler.py")),
    Exercise("repetition_penalty", 45, ("config.py", "sampler.py")),
    Exercise("prompt_logprobs", 120, (
        "config.py", "outputs.py", "sequence.py", "scheduler.py", "parallel.py",
        "model_runner.py")),
]


def exercise_list(exercises: list[Exercise]) -> Html:
    parts = []
    for exercise in exercises:
        test = f"tests/test_{exercise.name}.py"
        files = ", ".join(f"<code>{file}</code>" for file in exercise.files)
        title = (f"The tests: save them as <code>{test}</code>, and run "
                 f"<code>python -m pytest {test}</code>")
        parts.append(
            f'<section class="exercise" id="exercise-{exercise.name}">'
            f"{Renderer({}).render(exercise.text)}"
            f"<p>About {exercise.minutes} minutes. A solution touches {files}.</p>"
            f"{fold(title, code_block(highlight(exercise.test)))}</section>")
    return Html("".join(parts))
