"""The command ``meshwright check``: what it prints, and how it ends."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from meshwright.cli import main
from meshwright.testing import run_in_fresh_process


def run(*arguments, **more):
    return CliRunner().invoke(main, [str(argument) for argument in arguments], **more)


JOB = """
import jax.numpy as jnp, numpy as np, optax
import meshwright as mw


def build(scale=1.0):
    def loss(params, batch):
        return jnp.mean((batch["x"] @ params["w"]) ** 2) * scale

    program = mw.jax_program(loss, {"w": np.ones([8, 4])}, optax.sgd(0.1))
    return program, {"x": np.eye(16, 8)}


calls = []


def drifts():
    calls.append(1)
    return build(1 + 1e-3 * len(calls))


number = 3
"""
MESHES = ["--mesh", "batch=8", "--mesh", "batch=4,model=2"]
RULE = ["--layout", "w:unsharded,model"]


@pytest.fixture
def job(user_module):
    return user_module("checked_job", JOB)


@pytest.mark.parametrize("place", ["checked_job:build", "checked_job.py:build"])
def test_check_says_that_every_mesh_trains_as_one_device_does(job, place):
    result = run("check", place, *MESHES, *RULE, "--steps", 2, "--option", "zero=1", "--all")
    assert result.exit_code == 0, result.output
    assert "program: 2 steps in float32 on one device" in result.stdout
    assert "batch=4, model=2: equal to one device" in result.stdout
    assert result.stdout.endswith("Every mesh trains as one device does.\n")


def test_check_ends_with_1_and_names_what_differs(job):
    result = run("check", "checked_job:drifts", "--mesh", "batch=8", "--steps", 1)
    assert result.exit_code == 1
    assert "batch=8: NOT equal to one device; first difference: loss in step 1" in result.stdout
    assert "gradient, step 1" in result.stdout
    assert "1 of 1 meshes do not train as one device does: batch=8." in result.stdout


@pytest.mark.full
def test_check_makes_the_devices_that_its_meshes_need(job):
    code = """
        import sys
        sys.argv = ["meshwright", "check", "checked_job:build", "--mesh", "batch=16", "--double"]
        from meshwright.cli import main
        try:
            main()
        except SystemExit as end:
            print("ended with", end.code)
        """
    output = run_in_fresh_process(code)
    assert "program: 5 steps in float64 on one device" in output
    assert "batch=16: equal to one device" in output
    assert output.endswith("ended with 0\n")


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("checked_job", "expected module:function, such as train:build; received 'checked_job'."),
        ("checked_jo:build", "no module 'checked_jo' in "),
        ("checked_jo.py:build", "no file checked_jo.py in "),
        ("checked_job:biuld", "has no function 'biuld'. Its functions: build, drifts."),
        ("checked_few:nope", "has no function 'nope'. Its functions: alpha, nofwd."),
        ("checked_many:nope", "has no function 'nope'. It has 13; the nearest: nofwd."),
        ("checked_job:number", "has a value, not a function, named 'number'"),
        ("checked_broken:build", "failed: SyntaxError: invalid syntax (checked_broken.py, line 2)"),
        ("checked_lost:build", "No module named 'checked_no' (checked_lost.py, line 1)"),
        ("checked_norm:build", "No module named 'checked_no' (checked_norm.py, line 1)"),
        (
            "checked_ends:build",
            "importing checked_ends ended the program: SystemExit: 0 (checked_ends.py, line 3).",
        ),
        ("checked_ends.py:build", "ended the program: SystemExit: 0 (checked_ends.py, line 3)."),
        ("checked_in/part.py:build", "Name it as a module: checked_in.part:build."),
        ("checked_quits:build", "cannot build the model (checked_quits.py:2, in build): Sys"),
    ],
)
def test_check_tells_what_is_wrong_with_the_module(job, place, message):
    (job / "checked_broken.py").write_text("x = 1\nx = = 2\n")
    (job / "checked_lost.py").write_text("import checked_no\n")
    (job / "checked_norm.py").write_text("import checked_no\n")  # its name begins with that one
    (job / "checked_ends.py").write_text("import sys\n\nsys.exit(0)\n")
    (job / "checked_quits.py").write_text("def build():\n    raise SystemExit(0)\n")
    (job / "checked_in").mkdir()
    (job / "checked_in" / "part.py").write_text("from .other import Model\n")
    few = "def alpha(): pass\ndef nofwd(): pass\n"
    (job / "checked_few.py").write_text(few)
    (job / "checked_many.py").write_text(few + "".join(f"f{n} = alpha\n" for n in range(11)))
    result = run("check", place, "--mesh", "batch=8")
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr
    assert result.stderr.count("line 2)") <= 1


def test_errors_of_the_users_code_are_shown_by_its_own_lines(job):
    (job / "checked_raises.py").write_text(
        "def lookup(sizes):\n    return sizes['wide']\n\n\ndef build():\n    return lookup({})\n"
    )
    result = run("check", "checked_raises:build", "--mesh", "batch=8")
    assert result.exit_code == 2, result.output
    assert "cannot build the model (checked_raises.py:2, in lookup): KeyError: 'wide'" in (
        result.stderr
    )
    assert result.stderr.splitlines()[-2:] == [
        "  checked_raises.py:6, in build: return lookup({})",
        "  checked_raises.py:2, in lookup: return sizes['wide']",
    ]


def test_errors_in_the_users_loss_are_shown_by_its_own_lines(job):
    (job / "checked_loss.py").write_text(JOB.replace('params["w"]', 'params["v"]'))
    result = run("check", "checked_loss:build", "--mesh", "batch=8")
    assert result.exit_code == 2, result.output
    assert "KeyError: 'v'" in result.stderr
    assert "in build.<locals>.loss: return jnp.mean(" in result.stderr
    assert "site-packages" not in result.stderr


def test_a_batch_that_does_not_fit_the_loss_is_an_error_of_the_model(job):
    """No line of it is the user's: Keras' loss refuses what it gets."""
    (job / "checked_batch.py").write_text(
        "import keras\nimport numpy as np\n\n\ndef build():\n"
        "    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(2)])\n"
        "    model.compile('sgd', 'binary_crossentropy')\n"
        "    return model, (np.zeros([16, 4]), np.zeros([15, 2]))\n"
    )
    result = run("check", "checked_batch:build", "--mesh", "batch=8")
    assert result.exit_code == 2, result.output
    assert "the step of 'sequential' cannot be traced: ValueError: " in result.stderr
    assert "Traceback" not in result.stderr


def test_all_invalid_parameters_are_reported_at_once(job):
    arguments = ["checked_jo:build", "--target", "cpu", "--mesh", "batch", "--layout", "kernel"]
    result = run("dry-run", *arguments, "--save", "checked_job.py/plan.json", "--zero", "7")
    assert result.exit_code == 2
    assert "Error: 6 invalid parameters:\n" in result.stderr
    options = ("MODULE:BUILD", "--target", "--mesh", "--layout", "--save", "--zero")
    assert all(f"Invalid value for '{name}'" in result.stderr for name in options)


# Files with defaults of options

CONFIG = """
build = "checked_job:build"
mesh = [{ batch = 8 }, "batch=4,model=2"]

[check]
layout = { w = "unsharded,model" }
steps = 2
option = { zero = 1 }
"""


@pytest.mark.parametrize("place", ["pyproject.toml", "meshwright.toml"])
def test_options_come_from_a_file_and_the_command_line_wins(job, place):
    own, where = ["--steps", "1"], [] if place == "pyproject.toml" else ["--config", place]
    text = "[tool.meshwright]" + CONFIG.replace("[check]", "[tool.meshwright.check]")
    (job / place).write_text(CONFIG if where else text)
    result = run("check", *where)
    assert result.exit_code == 0, result.output
    assert "program: 2 steps" in result.stdout
    assert "batch=8: equal to one device\n  note: " in result.stdout  # the layout was taken
    assert "program: 1 steps" in run("check", *where, *own).stdout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("targte = 'cpu:8'", "conf.toml: unknown key 'targte'. Did you mean 'target'?"),
        ("[dry-run]\nstep = 2", "conf.toml, table 'dry-run': unknown key 'step'."),
        ("dry-run = 3", "conf.toml: 'dry-run' must be a table."),
        ("mesh = ['batch=8']", "conf.toml: 'mesh' takes one value; received a list of 1."),
        ("mesh = 'batch'", "(from conf.toml)"),
        ("mesh = ", "conf.toml cannot be read as TOML: "),
        ("mesh = 8", "Invalid value for '--mesh': "),
        ("rows = true", "conf.toml: 'rows': expected a text or a number; received true."),
    ],
)
def test_faults_of_a_file_with_defaults_name_it(job, text, message):
    (job / "conf.toml").write_text(text)
    result = run("dry-run", "checked_job:build", "--target", "cpu:8", "--config", "conf.toml")
    assert result.exit_code != 0
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr


def test_check_says_under_which_mesh_something_is_impossible(job):
    result = run("check", "checked_job:build", "--mesh", "batch=8", "--mesh", "batch=3")
    assert result.exit_code == 2
    assert "a batch of 16 does not divide over axis 'batch' (size 3)" in result.stderr
    assert result.stderr.endswith("This happened under the mesh batch=3.\n")


def test_check_says_the_faults_of_every_mesh_at_once(job):
    """What is wrong with the rules is said before anything is trained, or as it happens."""
    meshes = [word for size in (8, 3, 5) for word in ("--mesh", f"batch={size}")]
    rows = [f"a batch of 16 does not divide over axis 'batch' (size {size})" for size in (3, 5)]
    happened = run("check", "checked_job:build", *meshes)
    unknown = run("check", "checked_job:build", *meshes, "--layout", "v:unsharded,model")
    options = run("check", "checked_job:build", *meshes, *RULE[:1], "v:batch", "--option", "z=1")
    idle = "'v' matches no path."
    for result, messages in [
        (happened, rows),
        (unknown, ["layout 'v' names axis 'model'", idle]),
        (options, ["Placement and StepOptions take no option 'z'", idle]),
    ]:
        assert result.exit_code == 2, result.output
        assert [text for text in messages if result.stderr.count(text) != 1] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layout", "kernel"], "'--layout': expected pattern:layout, such as"),
        (["--option", "zero"], "'--option': expected name=value, such as zero=3"),
        (["--option", "steps=3"], "'steps' has an option of its own: --steps."),
    ],
)
def test_check_explains_its_own_options(job, arguments, message):
    result = run("check", "checked_job:build", "--mesh", "batch=8", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
