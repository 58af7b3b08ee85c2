"""LoRA networks: names and shapes of the specification, the formula, and what other programs read."""

from __future__ import annotations

import copy

import pytest
import torch
from safetensors.torch import load_file

from library.errors import OptionError
from networks import lora
from tests.conftest import spec_fixture

SIZES = {
    "sd15": {"cross": 768, "text": [(768, 12, 3072)], "linear": False, "heads": 8},
    "sd2": {"cross": 1024, "text": [(1024, 23, 4096)], "linear": False, "heads": [5, 10, 20, 20]},
    "sd2_diffusers": {"cross": 1024, "text": [(1024, 23, 4096)], "linear": True, "heads": [5, 10, 20, 20]},
    "sdxl": {"cross": 2048, "text": [(768, 12, 3072), (1280, 32, 5120)], "linear": True, "heads": [5, 10, 20]},
}
SDXL_UNET = {
    "block_out_channels": (320, 640, 1280),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": [1, 2, 10],
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}


def full_size(name: str):
    """U-Net and text encoders of full size on the meta device."""
    from diffusers import UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    sizes = SIZES[name]
    with torch.device("meta"):
        unet = UNet2DConditionModel(
            cross_attention_dim=sizes["cross"],
            attention_head_dim=sizes["heads"],
            use_linear_projection=sizes["linear"],
            **(SDXL_UNET if name == "sdxl" else {}),
        )
        encoders = []
        for index, (width, layers, mlp) in enumerate(sizes["text"]):
            config = CLIPTextConfig(
                hidden_size=width, num_hidden_layers=layers, intermediate_size=mlp, num_attention_heads=width // 64
            )
            encoders.append(CLIPTextModelWithProjection(config) if index else CLIPTextModel(config))
    return unet, encoders if len(encoders) > 1 else encoders[0]


@pytest.mark.parametrize("conv", [False, True], ids=["linear", "conv4"])
@pytest.mark.parametrize("name", SIZES)
def test_keys_and_shapes_equal_the_specification(name, conv):
    unet, text_encoder = full_size(name)
    arguments = {"conv_dim": "4"} if conv else {}
    with torch.device("meta"):
        network = lora.create_network(1.0, 4, 1.0, None, text_encoder, unet, **arguments)
    network.apply_to(text_encoder, unet)
    expected = spec_fixture(f"lora_keys_{name}{'_conv4' if conv else ''}.json")
    assert {key: list(value.shape) for key, value in network.state_dict().items()} == expected
    tags = list(network.parameter_tags())
    assert {(id(param), name, f"lora_{role}") for param, name, role, _ in tags} == {
        (id(param), name, name.split(".")[1]) for name, param in network.named_parameters()
    }
    outside = {name for _, name, _, block in tags if not block}
    assert not outside, "every layer lies in a block"


class Block(torch.nn.Module):
    """Stands where a transformer stands: one linear layer and two convolutions."""

    def __init__(self):
        super().__init__()
        self.proj_in = torch.nn.Linear(6, 6)
        self.conv = torch.nn.Conv2d(6, 6, 3, padding=1)

    def forward(self, x):
        return self.conv(self.proj_in(x.movedim(1, -1)).movedim(-1, 1))


Block.__name__ = "Transformer2DModel"


class Unet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.down_blocks = torch.nn.ModuleList([torch.nn.ModuleDict({"attentions": torch.nn.ModuleList([Block()])})])

    def forward(self, x):
        return self.down_blocks[0]["attentions"][0](x)


def small_network(unet: torch.nn.Module, **arguments):
    network = lora.create_network(1.0, 3, 1.5, None, [], unet, **arguments)
    network.apply_to([], unet)
    generator = torch.Generator().manual_seed(0)
    for param in network.parameters():
        param.data = torch.randn(param.shape, generator=generator) / 3
    return network


def test_output_is_the_formula():
    unet = Unet()
    block = unet.down_blocks[0]["attentions"][0]
    x = torch.randn(2, 6, 5, 5)
    plain = copy.deepcopy(unet)
    network = small_network(unet, conv_dim="2", conv_alpha="4")
    linear, conv = network.unet_loras
    assert (linear.scale, conv.scale) == (0.5, 2.0)
    with torch.no_grad():
        middle = plain.down_blocks[0]["attentions"][0].proj_in(x.movedim(1, -1))
        middle = middle + x.movedim(1, -1) @ linear.lora_down.weight.T @ linear.lora_up.weight.T * 0.5
        middle = middle.movedim(-1, 1)
        low = torch.nn.functional.conv2d(middle, conv.lora_down.weight, padding=1)
        expected = plain.down_blocks[0]["attentions"][0].conv(middle)
        expected = expected + torch.nn.functional.conv2d(low, conv.lora_up.weight) * 2.0
        torch.testing.assert_close(block(x), expected)


def test_merged_weights_give_the_same_output(tmp_path):
    unet, merged = Unet(), None
    merged = copy.deepcopy(unet)
    x = torch.randn(2, 6, 5, 5)
    network = small_network(unet, conv_dim="2")
    network.save_weights(tmp_path / "w.safetensors", None, {"ss_a": "b"})
    other, tensors = lora.create_network_from_weights(
        0.7, tmp_path / "w.safetensors", None, [], merged, for_inference=True
    )
    other.merge_to([], merged, tensors, torch.float32, "cpu")
    network.set_multiplier(0.7)
    torch.testing.assert_close(merged(x), unet(x), atol=1e-5, rtol=1e-5)


def test_one_network_with_convolutions_does_not_change_the_next():
    small_network(Unet(), conv_dim="2")
    assert len(small_network(Unet()).unet_loras) == 1


def test_dropouts_act_in_train_mode_only():
    x = torch.randn(4, 6, 5, 5)
    for name in ("rank_dropout", "module_dropout"):
        unet = Unet()
        network = small_network(unet, **{name: "0.5"})
        network.eval()
        assert torch.equal(unet(x), unet(x))
        network.train()
        torch.manual_seed(1)
        assert any(not torch.equal(unet(x), unet(x)) for _ in range(8))


def test_saved_alpha_is_a_float_and_hashes_are_those_of_the_file(tmp_path):
    import hashlib
    import json

    network = small_network(Unet())
    path = tmp_path / "w.safetensors"
    network.save_weights(path, torch.float16, {"ss_network_dim": "3"})
    tensors = load_file(path)
    assert {value.dtype for value in tensors.values()} == {torch.float16}
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    metadata = json.loads(content[8 : 8 + length])["__metadata__"]
    assert metadata["sshs_model_hash"] == hashlib.sha256(content[8 + length :]).hexdigest()
    assert metadata["sshs_legacy_hash"] == "e3b0c442"


def test_a_foreign_file_is_refused_and_a_partial_one_counted(tmp_path, caplog):
    network = small_network(Unet(), conv_dim="2")
    with pytest.raises(OptionError, match="none of its"):
        network.load_tensors({"other.lora_down.weight": torch.zeros(1)}, "x.safetensors")
    half = dict(list(network.state_dict().items())[:3])
    assert "3 of this network" in network.load_tensors(half, "x.safetensors")
    key = "lora_unet_down_blocks_0_attentions_0_proj_in.lora_down.weight"
    with pytest.raises(OptionError, match="dim_from_weights"):
        network.load_tensors({key: torch.zeros(7, 6)}, "x.safetensors")


def test_alpha_of_a_file_sets_the_scale():
    network = small_network(Unet())
    name = network.unet_loras[0].lora_name
    network.load_tensors({f"{name}.alpha": torch.tensor(6)}, "x")
    assert network.unet_loras[0].scale == 2.0


@pytest.mark.parametrize("folder_like", [True, False])
def test_sd2_files_load_into_both_shapes(folder_like):
    network = small_network(Unet())
    name = network.unet_loras[0].lora_name
    own = network.state_dict()[f"{name}.lora_up.weight"]
    network.load_tensors({f"{name}.lora_up.weight": torch.ones(6, 3, *([] if folder_like else [1, 1]))}, "x")
    assert torch.equal(network.state_dict()[f"{name}.lora_up.weight"], torch.ones_like(own))


@pytest.mark.parametrize(
    "arguments,match",
    [
        ({"conv_dims": "4"}, "Did you mean 'conv_dim'"),
        ({"conv_dim": "undefined"}, "not readable"),
        ({"rank_dropout": "1.5"}, r"\[0, 1\)"),
        ({"block_dims": "1,2"}, "25"),
        ({"down_lr_weight": "1"}, "cosine"),
    ],
)
def test_bad_network_args_are_told_in_one_line(arguments, match):
    with pytest.raises(OptionError, match=match) as raised:
        lora.create_network(1.0, 4, 1, None, [], Unet(), **arguments)
    assert "\n" not in str(raised.value)


def test_groups_follow_the_rates():
    unet = Unet()
    network = small_network(unet, loraplus_lr_ratio="4")
    groups, descriptions = network.prepare_optimizer_params([1e-5], 1e-3, 1e-4)
    assert descriptions == ["unet", "unet plus"]
    assert [group["lr"] for group in groups] == [1e-3, 4e-3]
    assert network.prepare_optimizer_params(None, 0, 1e-4)[0] == []
    assert network.prepare_optimizer_params(None, None, 1e-4)[0][0]["lr"] == 1e-4


def test_block_weights_make_groups_and_leave_blocks_out():
    weights = ",".join(["0", "0.5", *["1"] * 10])
    network = small_network(Unet(), down_lr_weight=weights)
    groups, descriptions = network.prepare_optimizer_params(None, 1e-3, None)
    assert descriptions == ["unet_block1"] and groups[0]["lr"] == 5e-4
    with pytest.raises(OptionError, match="no layer"):
        small_network(Unet(), down_lr_weight=",".join(["0"] * 12))


def test_norms_are_limited_like_the_plain_rule():
    network = small_network(Unet(), conv_dim="2")
    before = [(m.lora_up.weight.clone(), m.lora_down.weight.clone(), m.scale) for m in network.loras]
    scaled, mean, largest = network.apply_max_norm_regularization(0.3, torch.device("cpu"))
    expected = []
    for (up, down, scale), module in zip(before, network.loras):
        product = scale * torch.einsum("or,r...->o...", up.flatten(1), down)
        norm = max(product.norm().item(), 0.15)
        ratio = min(norm, 0.3) / norm
        expected.append(norm * ratio)
        torch.testing.assert_close(module.lora_up.weight, up * ratio**0.5)
    assert scaled == 2 and largest == pytest.approx(max(expected)) and mean == pytest.approx(sum(expected) / 2)


@pytest.mark.parametrize("conv", [False, True])
def test_a_saved_file_has_the_same_effect_in_diffusers(conv, tiny_sd1_folder, tmp_path):
    from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from transformers import CLIPTextModel, CLIPTokenizer

    def load():
        return (
            UNet2DConditionModel.from_pretrained(tiny_sd1_folder / "unet"),
            CLIPTextModel.from_pretrained(tiny_sd1_folder / "text_encoder"),
        )

    unet, text_encoder = load()
    network = lora.create_network(1.0, 4, 2.0, None, text_encoder, unet, **({"conv_dim": "2"} if conv else {}))
    network.apply_to(text_encoder, unet)
    for param in network.parameters():
        param.data = torch.randn_like(param) / 4
    network.save_weights(tmp_path / "w.safetensors", None, None)
    their_unet, their_encoder = load()
    pipeline = StableDiffusionPipeline(
        vae=AutoencoderKL.from_pretrained(tiny_sd1_folder / "vae"),
        text_encoder=their_encoder,
        tokenizer=CLIPTokenizer.from_pretrained(tiny_sd1_folder / "tokenizer"),
        unet=their_unet,
        scheduler=DDIMScheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    x, t, ids = torch.randn(1, 4, 8, 8), torch.tensor([500]), torch.arange(77).unsqueeze(0)
    with torch.no_grad():
        before = pipeline.unet(x, t, pipeline.text_encoder(ids)[0]).sample
        pipeline.load_lora_weights(str(tmp_path), weight_name="w.safetensors")
        theirs = pipeline.unet(x, t, pipeline.text_encoder(ids)[0]).sample
        ours = unet(x, t, text_encoder(ids)[0]).sample
    assert (before - ours).abs().max() > 1e-2
    assert (theirs - ours).abs().max() < 1e-4
