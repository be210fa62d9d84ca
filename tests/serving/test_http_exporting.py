"""A model as files that run without Meshwright."""

from __future__ import annotations

import runpy
import subprocess
import sys
from types import SimpleNamespace

import jax.numpy as jnp
import keras
import ml_dtypes
import numpy as np
import pytest

import meshwright as mw
from meshwright.errors import ServingError
from meshwright.extras import is_installed
from meshwright.serving.exporting import export


def doubled(params, inputs):
    total = jnp.sum(inputs["x"] * params["kernel"].astype("float32"), 1)
    return {"total": total + params["bias"], "ids": inputs["ids"] * 2}


def server(**how):
    params = {"kernel": np.arange(3, dtype=ml_dtypes.bfloat16), "bias": np.float32(0.5)}
    example = {"x": np.ones([1, 3], "float32"), "ids": np.ones([1, 2], "int32")}
    return mw.Server(doubled, params=params, example=example, name="twice", **how)


@pytest.mark.full
@pytest.mark.alone
def test_stablehlo_runs_without_meshwright_for_any_number_of_rows(tmp_path):
    export(server().model("twice"), tmp_path / "out")
    rng = np.random.default_rng(0)
    inputs = {"x": rng.normal(size=(5, 3)).astype("float32"), "ids": np.arange(10).reshape(5, 2)}
    np.savez(tmp_path / "in.npz", **inputs)
    code = "import sys; sys.modules['meshwright'] = None; import runpy; sys.argv = sys.argv[1:]; "
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    words = [tmp_path / "out" / "load.py", tmp_path / "in.npz", tmp_path / "out.npz"]
    subprocess.run([sys.executable, "-c", code, *words], check=True, cwd=tmp_path, timeout=120)
    loader = runpy.run_path(str(words[0]))
    with pytest.raises(ValueError, match="'ids' has values outside the range of int32"):
        loader["predict"]({**inputs, "ids": inputs["ids"] + 2**33})
    with server() as here, np.load(tmp_path / "out.npz") as outputs:
        answer = here.answer(inputs).outputs
        assert set(outputs) == set(answer)
        for name in answer:
            assert np.allclose(outputs[name], answer[name])
    assert len((tmp_path / "out" / "load.py").read_text().splitlines()) < 36


def test_what_cannot_be_exported_is_refused(tmp_path):
    model = SimpleNamespace(source=SimpleNamespace(tables=None, whole_mesh=mw.Mesh({"model": 2})))
    with pytest.raises(ServingError, match="leave --mesh out"):
        export(model, tmp_path)
    model.source.whole_mesh = mw.Mesh({"batch": 1})
    (tmp_path / "file").touch()
    with pytest.raises(ServingError, match="is not empty"):
        export(model, tmp_path)
    with pytest.raises(mw.DataError, match=r"cannot write the exported model to '.*file': Not a"):
        export(model, tmp_path / "file")
    with pytest.raises(ServingError, match="unknown format 'caffe'"):
        export(model, tmp_path, "caffe")
    for format, package in (("savedmodel", "tensorflow"), ("onnx", "jax2onnx")):
        if not is_installed(package):
            with pytest.raises(ServingError, match=rf"needs {package}.*: pip install {package}"):
                export(model, tmp_path / "new", format)


def test_a_model_with_tables_on_servers_names_its_way_out(tmp_path):
    ids = keras.Input([], dtype="int32", name="ids")
    shop = keras.Model(ids, mw.ps.Embedding("people", 4, 20)(ids), name="shop")
    with pytest.raises(ServingError, match=r"strategy\.export\(model\)\.save"):
        export(mw.Server(shop).model("shop"), tmp_path / "out")


@keras.saving.register_keras_serializable("meshwright-tests")
class Positions(keras.layers.Layer):
    """As position embeddings, which there are so many of."""

    def call(self, x):
        if x.shape[1] > 8:
            raise ValueError("at most 8 positions")
        return x + jnp.arange(x.shape[1], dtype="float32")[:, None]

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, x.dtype)


@pytest.mark.full
def test_lengths_bound_what_a_model_takes_in_any_length(tmp_path):
    ids = keras.Input([None], dtype="int32", name="ids")
    mask = keras.Input([None], name="mask")
    x = Positions()(keras.layers.Embedding(9, 4)(ids)) * keras.ops.expand_dims(mask, -1)
    model = keras.Model([ids, mask], {"sum": keras.ops.sum(x, axis=1)}, name="bounded")
    with pytest.raises(mw.ModelError, match=r"'length_0' > '8' is inconclusive. Give lengths="):
        export(mw.Server(model).model("bounded"), tmp_path / "free")
    with mw.Server(model, lengths=[8], buckets=[1]) as here:
        export(here.model("bounded"), tmp_path / "out")
        inputs = {"ids": np.arange(5)[None] + 1, "mask": np.ones([1, 5], "float32")}
        answer = here.answer(inputs).outputs["sum"]
    loader = runpy.run_path(str(tmp_path / "out" / "load.py"))
    np.testing.assert_allclose(loader["predict"](inputs)["sum"], answer, rtol=1e-6)
