"""Networks of the lycoris-lora package: trained, saved under the reference's keys, resumed to the bit, filtered."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from library.errors import OptionError
from networks.foreign import parameter_tags
from tests.training import first_difference, make_tiles, read_state, train

pytest.importorskip("lycoris", reason="lycoris-lora is not installed")

LYCORIS = {"network_module": "lycoris.kohya", "network_dim": 4, "network_alpha": 2, "max_train_steps": 3}


@pytest.fixture
def sd1(tiny_sd1_folder, tmp_path):
    return {
        **LYCORIS,
        "pretrained_model_name_or_path": tiny_sd1_folder,
        "train_data_dir": make_tiles(tmp_path / "data"),
        "output_dir": tmp_path / "out",
    }


@pytest.fixture
def sdxl(sd1, tiny_sdxl_folder):
    return {**sd1, "script": "sdxl_train_network", "pretrained_model_name_or_path": tiny_sdxl_folder}


def modules(file) -> set[str]:
    return {key.split(".")[0] for key in load_file(file)}


@pytest.mark.parametrize(
    "algo,part",
    [
        ("lora", "lora_up.weight"),
        ("loha", "hada_w1_a"),
        ("lokr", "lokr_w1"),
        ("full", "diff"),
        ("diag-oft", "oft_blocks"),
    ],
)
def test_algorithms_train_under_a_filter(algo, part, sd1):
    arguments = [f"algo={algo}", "conv_dim=2", "conv_alpha=1", "factor=4", "preset=full"]
    train(**sd1, network_args=arguments, grad_filter="topk", grad_filter_args=["keep=0.5", "policy=update"])
    tensors = load_file(sd1["output_dir"] / "t.safetensors")
    own = {key: value for key, value in tensors.items() if key.endswith(part)}
    assert own and any(value.any() for value in own.values())
    names = {key.split(".")[0] for key in own}
    assert {"lora_unet_down_blocks_0_resnets_0_conv1", "lora_unet_time_embedding_linear_1"} <= names
    assert "lora_te_text_model_encoder_layers_0_mlp_fc1" in names
    with safe_open(sd1["output_dir"] / "t.safetensors", "pt") as stream:
        entries = stream.metadata()
    assert entries["ss_network_module"] == "lycoris.kohya"
    assert json.loads(entries["ss_network_args"])["algo"] == algo


def test_sdxl_files_have_the_keys_of_the_original_model(sdxl):
    train(**sdxl, network_args=["algo=loha", "preset=full"])
    names = modules(sdxl["output_dir"] / "t.safetensors")
    assert {name.split("_")[1] for name in names} == {"unet", "te1", "te2"}
    assert {
        "lora_te1_text_model_encoder_layers_0_self_attn_q_proj",
        "lora_te2_text_model_encoder_layers_0_mlp_fc2",
        "lora_unet_input_blocks_1_0_in_layers_2",
        "lora_unet_input_blocks_3_0_op",
        "lora_unet_input_blocks_4_1_transformer_blocks_0_attn2_to_k",
        "lora_unet_middle_block_1_proj_in",
        "lora_unet_output_blocks_0_0_skip_connection",
    } <= names
    assert not any("down_blocks" in name or "resnets" in name or "embed" in name for name in names)


@pytest.mark.parametrize("preset,inside", [("attn-only", "attn"), ("attn-mlp", "transformer_blocks|proj_")])
def test_presets_find_the_layers_they_name(preset, inside, sd1):
    train(**sd1, network_args=["algo=lokr", f"preset={preset}"], network_train_unet_only=True)
    names = modules(sd1["output_dir"] / "t.safetensors")
    assert names and all(any(part in name for part in inside.split("|")) for name in names)
    assert "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q" in names


@pytest.mark.parametrize("algo", ["loha", "lokr"])
@pytest.mark.parametrize("family", ["sd1", "sdxl"])
def test_resumed_run_ends_where_the_unbroken_run_ends(family, algo, request, tmp_path):
    options = request.getfixturevalue(family)
    options |= {"network_args": [f"algo={algo}", "rank_dropout=0.1"], "grad_filter": "topk_change", "save_state": True}
    options |= {"save_every_n_steps": 2, "max_train_steps": 4}
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    train(**{**options, "output_dir": straight})
    train(**{**options, "output_dir": resumed}, resume=straight / "t-step00000002-state")
    assert first_difference(read_state(resumed / "t-state"), read_state(straight / "t-state")) is None
    weights = [load_file(folder / "t.safetensors") for folder in (straight, resumed)]
    assert first_difference(*weights) is None and any(value.any() for value in weights[0].values())


def test_dim_from_weights_continues_a_file(sdxl, tmp_path):
    train(**sdxl, network_args=["algo=loha"])
    first = sdxl["output_dir"] / "t.safetensors"
    more = {"network_weights": first, "dim_from_weights": True, "learning_rate": 1e-12, "output_name": "again"}
    train(**{**sdxl, **more})
    before, after = load_file(first), load_file(sdxl["output_dir"] / "again.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.allclose(before[key].float(), after[key].float(), atol=1e-5) for key in before)


def test_blocks_of_its_layers_are_known_to_filters():
    network = torch.nn.Module()
    for name in ("lora_unet_down_blocks_1_attentions_0_proj_in", "lora_te_text_model_encoder_layers_0_mlp_fc1"):
        network.add_module(name, torch.nn.Linear(1, 1, bias=False))
    assert [(name.split(".")[1], block) for _, name, _, block in parameter_tags(network)] == [
        ("weight", "IN04"),
        ("weight", "TE"),
    ]


@pytest.mark.parametrize("argument", ["algo=nonsense", "preset=none_such.toml", "conv_dim=many"])
def test_what_the_package_refuses_is_one_line(argument, sd1):
    with pytest.raises(OptionError, match="could not make its network") as raised:
        train(**sd1, network_args=[argument])
    assert len(str(raised.value).splitlines()) == 1


def test_a_full_disk_leaves_nothing_of_a_foreign_file(sd1, monkeypatch, tmp_path):
    from networks import foreign

    class Network(torch.nn.Module):
        def save_weights(self, file, dtype, metadata):
            with open(file, "w") as stream:
                stream.write("half")
            raise OSError("full")

    (tmp_path / "t.safetensors").write_text("earlier")
    with pytest.raises(OSError, match="full"):
        foreign.save_weights(Network(), tmp_path / "t.safetensors", None, {})
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["t.safetensors"]
    assert (tmp_path / "t.safetensors").read_text() == "earlier" and not list(tmp_path.glob(".t*"))
