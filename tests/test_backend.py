"""Keras runs on JAX, or an error says which line to change."""

from __future__ import annotations

import pytest

from meshwright.testing import run_in_fresh_process

TRY = """
try:
    import meshwright
except RuntimeError as error:
    print(type(error).__name__, error, sep=": ")
"""


@pytest.mark.full
def test_where_nothing_is_chosen_jax_is():
    out = run_in_fresh_process(
        """
        import meshwright, os
        print(os.environ["KERAS_BACKEND"])
        import keras
        print(keras.config.backend())
        """
    )
    assert out == "jax\njax\n"


@pytest.mark.parametrize("chosen", ["jax", ""])
def test_jax_or_an_empty_choice_is_right(chosen):
    code = "import meshwright, os; print(os.environ['KERAS_BACKEND'])"
    assert run_in_fresh_process(code, env={"KERAS_BACKEND": chosen}) == "jax\n"


@pytest.mark.parametrize("chosen", ["tensorflow", "torch", "numpy"])
def test_another_choice_is_an_error_with_the_line_to_change(chosen):
    out = run_in_fresh_process(TRY, env={"KERAS_BACKEND": chosen})
    assert out == (
        f"BackendError: KERAS_BACKEND={chosen} is set, and Meshwright runs on JAX. "
        "Change that line to KERAS_BACKEND=jax.\n"
    )


@pytest.mark.full
def test_keras_that_runs_on_another_backend_already_is_an_error():
    out = run_in_fresh_process("import keras" + TRY, env={"KERAS_BACKEND": "numpy"})
    assert out == (
        "BackendError: Keras is already imported with the backend 'numpy', and Meshwright runs on "
        "JAX. Put `import meshwright` before `import keras`, or set the environment variable "
        "KERAS_BACKEND=jax.\n"
    )


@pytest.mark.full
def test_what_keras_runs_on_counts_more_than_the_variable():
    # Changed after Keras has read it, the variable says nothing any more.
    wrong = "import keras, os; os.environ['KERAS_BACKEND'] = 'jax'" + TRY
    out = run_in_fresh_process(wrong, env={"KERAS_BACKEND": "numpy"})
    assert out.startswith("BackendError: Keras is already imported with the backend 'numpy'")
    right = "import keras, os; os.environ['KERAS_BACKEND'] = 'torch'" + TRY
    assert run_in_fresh_process(right, env={"KERAS_BACKEND": "jax"}) == ""
