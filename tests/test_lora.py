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


@pytest.mark.parametrize("name", ["dropout", "rank_dropout", "module_dropout"])
def test_dropouts_act_in_train_mode_only(name):
    x = torch.randn(4, 6, 5, 5)
    unet = Unet()
    network = small_network(unet, **{name: "0.5"})
    network.eval()
    assert torch.equal(unet(x), unet(x))
    network.on_epoch_start([], unet)
    torch.manual_seed(1)
    assert any(not torch.equal(unet(x), unet(x)) for _ in range(8))


def test_dropout_of_the_arguments_wins_over_the_option():
    network = lora.create_network(1.0, 3, 1, None, [], Unet(), neuron_dropout=0.2, dropout="0.3")
    assert network.unet_loras[0].dropout == 0.3
    assert lora.create_network(1.0, 3, 1, None, [], Unet(), neuron_dropout=0.2).unet_loras[0].dropout == 0.2


@pytest.mark.parametrize("layer,shape", [(torch.nn.Linear(6, 5), (4, 7, 6)), (torch.nn.Conv2d(6, 5, 3), (4, 6, 8, 8))])
def test_rank_dropout_drops_ranks_of_whole_samples_and_makes_up_for_them(layer, shape):
    module = lora.LoRAModule("x", layer, lora_dim=3, alpha=1.5, rank_dropout=0.4)
    torch.nn.init.normal_(module.lora_up.weight)
    plain = layer.forward
    module.apply_to()
    x = torch.randn(shape)
    torch.manual_seed(3)
    ours = layer(x)
    torch.manual_seed(3)
    kept = torch.rand(4, 3) > 0.4
    assert kept.any() and not kept.all()
    for sample in range(4):
        up = module.lora_up.weight * kept[sample].reshape(1, 3, *[1] * (module.lora_up.weight.dim() - 2))
        weight = lora.low_rank_product(up, module.lora_down.weight) * 0.5 / 0.6
        one = x[sample : sample + 1]
        change = torch.nn.functional.conv2d(one, weight) if weight.dim() == 4 else one @ weight.T
        torch.testing.assert_close(ours[sample : sample + 1], plain(one) + change)


def test_module_dropout_leaves_the_layer_alone_as_often_as_asked():
    layer = torch.nn.Linear(6, 5)
    module = lora.LoRAModule("x", layer, lora_dim=3, module_dropout=0.25)
    torch.nn.init.ones_(module.lora_up.weight)
    plain = layer.forward
    module.apply_to()
    x = torch.randn(2, 6)
    torch.manual_seed(0)
    left_alone = sum(torch.equal(layer(x), plain(x)) for _ in range(400))
    assert 70 < left_alone < 130


def test_the_first_step_changes_nothing_and_has_no_gradient_for_the_down_matrices():
    unet = Unet()
    plain = copy.deepcopy(unet)
    network = lora.create_network(1.0, 3, 1, None, [], unet, conv_dim="2")
    network.apply_to([], unet)
    network.prepare_grad_etc([], unet)
    x = torch.randn(2, 6, 5, 5)
    torch.testing.assert_close(unet(x), plain(x), rtol=0, atol=0)
    unet(x).square().mean().backward()
    for param, _, role, _ in network.parameter_tags():
        assert bool(param.grad.any()) == (role == "up")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_under_autocast_the_output_has_the_dtype_of_the_layer(dtype):
    unet = Unet()
    small_network(unet, conv_dim="2", rank_dropout="0.1")
    x = torch.randn(2, 6, 5, 5)
    with torch.autocast("cpu", dtype):
        assert unet(x).dtype == dtype
    assert unet(x).dtype == torch.float32


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
    assert metadata["ss_network_dim"] == "3"


@pytest.mark.parametrize("suffix", [".safetensors", ".ckpt", ".pt"])
def test_every_kind_of_file_comes_back(suffix, tmp_path):
    network, other = small_network(Unet(), conv_dim="2"), small_network(Unet(), conv_dim="2")
    for param in other.parameters():
        param.data.zero_()
    network.save_weights(tmp_path / f"w{suffix}", None, None)
    other.load_weights(tmp_path / f"w{suffix}")
    torch.testing.assert_close(other.state_dict(), network.state_dict(), rtol=0, atol=0)


class Code:
    def __reduce__(self):
        return (print, ("the file's code ran",))


def test_a_pickle_with_code_is_refused_and_never_run(tmp_path, capsys):
    torch.save({"x": Code()}, tmp_path / "w.pt")
    with pytest.raises(OptionError, match=r"--network_weights .*w\.pt"):
        small_network(Unet()).load_weights(tmp_path / "w.pt")
    with pytest.raises(OptionError, match="no such file"):
        small_network(Unet()).load_weights(tmp_path / "missing.safetensors")
    assert "ran" not in capsys.readouterr().out


def test_a_foreign_file_is_refused_and_a_partial_one_counted(tmp_path, caplog):
    network = small_network(Unet(), conv_dim="2")
    with pytest.raises(OptionError, match="none of its"):
        network.load_tensors({"other.lora_down.weight": torch.zeros(1)}, "x.safetensors")
    half = dict(list(network.state_dict().items())[:3])
    assert "3 of this network" in network.load_tensors(half, "x.safetensors")
    key = "lora_unet_down_blocks_0_attentions_0_proj_in.lora_down.weight"
    with pytest.raises(OptionError, match="dim_from_weights"):
        network.load_tensors({key: torch.zeros(7, 6)}, "x.safetensors")


def test_a_convolution_is_no_linear_layer_with_as_many_values():
    network = small_network(Unet())
    name = network.unet_loras[0].lora_name
    with pytest.raises(OptionError, match="dim_from_weights"):
        network.load_tensors({f"{name}.lora_down.weight": torch.zeros(1, 2, 3, 3)}, "x")
    with pytest.raises(OptionError, match="dim_from_weights"):
        network.load_tensors({f"{name}.lora_down.weight": torch.zeros(6, 3)}, "x")


def test_alpha_of_a_file_sets_the_scale_and_says_so(caplog):
    network = small_network(Unet())
    name = network.unet_loras[0].lora_name
    network.load_tensors({f"{name}.alpha": torch.tensor(6)}, "x")
    assert network.unet_loras[0].scale == 2.0
    assert "its alpha replaces --network_alpha" in caplog.text


def test_alpha_of_a_saved_state_sets_the_scale_unless_it_is_only_rounded():
    for alpha, scale in ((6.0, 2.0), (1.1, 1.1 / 3)):
        network = lora.create_network(1.0, 3, 1.1, None, [], Unet())
        network.apply_to([], None)
        state = {key: value.bfloat16() for key, value in network.state_dict().items()}
        state["lora_unet_down_blocks_0_attentions_0_proj_in.alpha"] = torch.tensor(alpha, dtype=torch.bfloat16)
        network.load_state_dict(state)
        assert network.unet_loras[0].scale == scale


def test_a_network_made_from_a_file_has_its_modules_ranks_and_alphas(tmp_path, caplog):
    source = small_network(Unet(), conv_dim="5", conv_alpha="2")
    source.save_weights(tmp_path / "w.safetensors", None, None)
    unet = Unet()
    network, tensors = lora.create_network_from_weights(
        1.0, tmp_path / "w.safetensors", None, [], unet, rank_dropout="0.1", conv_dim="9"
    )
    network.apply_to([], unet)
    network.load_tensors(tensors, "x")
    assert [(m.lora_dim, m.scale, m.rank_dropout) for m in network.loras] == [(3, 0.5, 0.1), (5, 0.4, 0.1)]
    torch.testing.assert_close(network.state_dict(), source.state_dict(), rtol=0, atol=0)
    assert "conv_dim come from" in caplog.text
    with pytest.raises(OptionError, match="none of its 1 modules is in this model"):
        lora.create_network_from_weights(
            1.0, "f", None, [], unet, weights_sd={"lora_unet_x.lora_down.weight": torch.ones(2, 2)}
        )
    with pytest.raises(OptionError, match="--base_weights f: it holds no LoRA"):
        lora.create_network_from_weights(1.0, "f", None, [], unet, weights_sd={"a": torch.ones(1)}, for_inference=True)


def test_a_file_without_alpha_has_the_scale_1():
    name = "lora_unet_down_blocks_0_attentions_0_proj_in"
    weights = {f"{name}.lora_down.weight": torch.ones(2, 6), f"{name}.lora_up.weight": torch.ones(6, 2)}
    network, _ = lora.create_network_from_weights(1.0, None, None, [], Unet(), weights_sd=weights)
    assert [(m.lora_dim, m.scale) for m in network.loras] == [(2, 1.0)]


@pytest.mark.parametrize("folder_like", [True, False])
def test_sd2_files_load_into_both_shapes(folder_like):
    network = small_network(Unet())
    name = network.unet_loras[0].lora_name
    own = network.state_dict()[f"{name}.lora_up.weight"]
    network.load_tensors({f"{name}.lora_up.weight": torch.ones(6, 3, *([] if folder_like else [1, 1]))}, "x")
    assert torch.equal(network.state_dict()[f"{name}.lora_up.weight"], torch.ones_like(own))


def test_groups_follow_the_rates():
    unet = Unet()
    network = small_network(unet, loraplus_lr_ratio="4")
    groups, descriptions = network.prepare_optimizer_params([1e-5], 1e-3, 1e-4)
    assert descriptions == ["unet", "unet plus"]
    assert [group["lr"] for group in groups] == [1e-3, 4e-3]
    assert network.prepare_optimizer_params(None, 0, 1e-4)[0] == []
    assert network.prepare_optimizer_params(None, None, 1e-4)[0][0]["lr"] == 1e-4


def test_every_trained_part_has_a_group(tiny_sd1):
    unet, text_encoder = tiny_sd1
    network = lora.create_network(1.0, 2, 1, None, text_encoder, unet, loraplus_text_encoder_lr_ratio="2")
    network.apply_to(text_encoder, unet)
    groups, descriptions = network.prepare_optimizer_params_with_multiple_te_lrs([1e-5], None, 1e-4)
    assert descriptions == ["textencoder", "textencoder plus", "unet"]
    assert [group["lr"] for group in groups] == [1e-5, 2e-5, 1e-4]
    grouped = [param for group in groups for param in list(group["params"])]
    assert {id(param) for param in grouped} == {id(param) for param in network.get_trainable_params()}
    assert len(grouped) == len(set(map(id, grouped)))
    network.apply_to(text_encoder, unet, apply_text_encoder=False)
    assert network.prepare_optimizer_params([1e-5], None, 1e-4)[1] == ["unet"]


@pytest.mark.parametrize(
    "rates,expected",
    [
        ([1e-5], [("textencoder", 1e-5)]),
        ([1e-5, 1e-5], [("textencoder", 1e-5)]),
        ([1e-5, 2e-5], [("textencoder1", 1e-5), ("textencoder2", 2e-5)]),
        ([0.0, 2e-5], [("textencoder2", 2e-5)]),
        ([], [("textencoder", 1e-4)]),
        (None, [("textencoder", 1e-4)]),
        (0.0, []),
    ],
)
def test_two_text_encoders_may_have_their_own_rates(rates, expected, tiny_sdxl):
    unet, text_encoders = tiny_sdxl
    network = lora.create_network(1.0, 2, 1, None, text_encoders, unet)
    network.apply_to(text_encoders, unet, apply_unet=False)
    groups, descriptions = network.prepare_optimizer_params_with_multiple_te_lrs(rates, 1e-3, 1e-4)
    assert list(zip(descriptions, (group["lr"] for group in groups))) == expected
    if len(expected) == 2:
        assert all(name.startswith("lora_te2_") for name in names_of(network, groups[1]))
    first = network.prepare_optimizer_params(rates, 1e-3, 1e-4)[1]
    assert first == ([] if rates in (0.0, [0.0, 2e-5]) else ["textencoder"])


def names_of(network, group) -> list[str]:
    by_id = {id(param): name for param, name, _, _ in network.parameter_tags()}
    return [by_id[id(param)] for param in group["params"]]


def test_block_weights_make_groups_and_leave_blocks_out():
    weights = ",".join(["0", "0.5", *["1"] * 10])
    network = small_network(Unet(), down_lr_weight=weights)
    groups, descriptions = network.prepare_optimizer_params(None, 1e-3, None)
    assert descriptions == ["unet_block1"] and groups[0]["lr"] == 5e-4
    with pytest.raises(OptionError, match="no layer"):
        small_network(Unet(), down_lr_weight=",".join(["0"] * 12))


@pytest.mark.parametrize("limit,count", [(0.3, 2), (1.5, 1), (50.0, 0)])
def test_norms_are_limited_like_the_plain_rule(limit, count):
    network = small_network(Unet(), conv_dim="2")
    before = [(m.lora_up.weight.clone(), m.lora_down.weight.clone(), m.scale) for m in network.loras]
    scaled, mean, largest = network.apply_max_norm_regularization(limit, torch.device("cpu"))
    expected = []
    for (up, down, scale), module in zip(before, network.loras):
        product = scale * torch.einsum("or,r...->o...", up.flatten(1), down)
        norm = max(product.norm().item(), limit / 2)
        ratio = min(norm, limit) / norm
        expected.append(norm * ratio)
        torch.testing.assert_close(module.lora_up.weight, up * ratio**0.5)
        torch.testing.assert_close(module.lora_down.weight, down * ratio**0.5)
    assert scaled == count
    assert (mean, largest) == (pytest.approx(sum(expected) / 2), pytest.approx(max(expected)))


# ----------------------------------------------------------------------------------------------- real small models


@pytest.fixture(params=["sd1", "sd2"])
def tiny_folder(request, tiny_sd1_folder, tiny_sd2_folder):
    return tiny_sd1_folder if request.param == "sd1" else tiny_sd2_folder


def load_sd(folder):
    from diffusers import UNet2DConditionModel
    from transformers import CLIPTextModel

    return (
        UNet2DConditionModel.from_pretrained(folder / "unet"),
        CLIPTextModel.from_pretrained(folder / "text_encoder"),
    )


@pytest.fixture
def tiny_sd1(tiny_sd1_folder):
    return load_sd(tiny_sd1_folder)


def make_tiny_sdxl():
    """U-Net and text encoders of SDXL's structure; the same weights every time."""
    from diffusers import UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        **SDXL_UNET
        | {
            "block_out_channels": (32, 64, 64),
            "transformer_layers_per_block": [1, 1, 2],
            "attention_head_dim": 4,
            "cross_attention_dim": 48,
            "use_linear_projection": True,
            "addition_time_embed_dim": 8,
            "projection_class_embeddings_input_dim": 80,
        }
    )
    config = CLIPTextConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=2, intermediate_size=64, num_attention_heads=2
    )
    return unet, [CLIPTextModel(config), CLIPTextModelWithProjection(config)]


@pytest.fixture
def tiny_sdxl():
    return make_tiny_sdxl()


def predict(unet, text_encoder) -> torch.Tensor:
    torch.manual_seed(5)
    ids = torch.arange(77).unsqueeze(0)
    with torch.no_grad():
        return unet(torch.randn(1, 4, 8, 8), torch.tensor([500]), text_encoder(ids)[0]).sample


def trained_network(text_encoder, unet, **arguments):
    """A network whose matrices look trained, attached."""
    network = lora.create_network(1.0, 4, 2.0, None, text_encoder, unet, **arguments)
    network.apply_to(text_encoder, unet)
    torch.manual_seed(7)
    for param in network.parameters():
        param.data = torch.randn_like(param) / 4
    return network


@pytest.mark.parametrize("conv", [{}, {"conv_dim": "2"}], ids=["linear", "conv"])
def test_a_saved_file_has_the_same_effect_in_diffusers(conv, tiny_folder, tmp_path):
    from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline
    from transformers import CLIPTokenizer

    unet, text_encoder = load_sd(tiny_folder)
    before = predict(unet, text_encoder)
    trained_network(text_encoder, unet, **conv).save_weights(tmp_path / "w.safetensors", None, None)
    their_unet, their_encoder = load_sd(tiny_folder)
    pipeline = StableDiffusionPipeline(
        vae=AutoencoderKL.from_pretrained(tiny_folder / "vae"),
        text_encoder=their_encoder,
        tokenizer=CLIPTokenizer.from_pretrained(tiny_folder / "tokenizer"),
        unet=their_unet,
        scheduler=DDIMScheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.load_lora_weights(str(tmp_path), weight_name="w.safetensors")
    ours = predict(unet, text_encoder)
    assert (before - ours).abs().max() > 1e-2
    assert (predict(pipeline.unet, pipeline.text_encoder) - ours).abs().max() < 1e-4
    ids = torch.arange(77).unsqueeze(0)
    torch.testing.assert_close(pipeline.text_encoder(ids)[0], text_encoder(ids)[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("conv", [{}, {"conv_dim": "2"}], ids=["linear", "conv"])
def test_base_weights_merged_into_the_model_act_like_the_network(conv, tiny_folder, tmp_path):
    unet, text_encoder = load_sd(tiny_folder)
    network = trained_network(text_encoder, unet, **conv)
    network.save_weights(tmp_path / "w.safetensors", None, None)
    merged_unet, merged_encoder = load_sd(tiny_folder)
    other, tensors = lora.create_network_from_weights(
        0.5, tmp_path / "w.safetensors", None, merged_encoder, merged_unet, for_inference=True
    )
    other.merge_to(merged_encoder, merged_unet, tensors, torch.float32, "cpu")
    network.set_multiplier(0.5)
    torch.testing.assert_close(predict(merged_unet, merged_encoder), predict(unet, text_encoder), atol=1e-4, rtol=1e-4)
    assert not hasattr(merged_unet.conv_in, "lora_down") and other.unet_loras[0]._original[0] in merged_unet.modules()


def test_a_merge_is_rounded_once():
    layer = torch.nn.Linear(64, 64)
    module = lora.LoRAInfModule("x", layer, lora_dim=4)
    torch.nn.init.normal_(module.lora_up.weight)
    expected = (layer.weight + module.lora_up.weight @ module.lora_down.weight / 4).bfloat16()
    module.merge_to(torch.bfloat16)
    assert torch.equal(layer.weight, expected)


@pytest.mark.parametrize("name", ["from_weights", "load_weights"])
def test_sdxl_files_in_diffusers_naming_load(name, tiny_sdxl):
    unet, text_encoders = tiny_sdxl
    network = trained_network(text_encoders, unet, conv_dim="2")
    paths = {id(module): path for path, module in unet.named_modules()}
    renamed = {m.lora_name: f"lora_unet_{paths[id(m._original[0])].replace('.', '_')}" for m in network.unet_loras}
    theirs = {}
    for key, value in network.state_dict().items():
        module, _, rest = key.partition(".")
        theirs[f"{renamed.get(module, module)}.{rest}"] = value.clone()
    expected = network.state_dict()
    assert set(theirs) != set(expected)
    if name == "from_weights":
        other, tensors = lora.create_network_from_weights(1.0, None, None, text_encoders, unet, weights_sd=theirs)
        assert set(tensors) == set(expected)
    else:
        other, tensors = lora.create_network(1.0, 4, 2.0, None, text_encoders, unet, conv_dim="2"), theirs
    other.apply_to(text_encoders, unet)
    assert other.load_tensors(tensors, "x") == f"x: {len(expected)} tensors loaded"
    torch.testing.assert_close(other.state_dict(), expected, rtol=0, atol=0)


@pytest.mark.parametrize("conv", [{}, {"conv_dim": "2"}], ids=["linear", "conv"])
def test_an_sdxl_file_has_the_same_effect_in_diffusers(conv, tiny_sdxl, tmp_path):
    from diffusers import StableDiffusionXLPipeline

    unet, text_encoders = tiny_sdxl
    their_unet, their_encoders = make_tiny_sdxl()
    trained_network(text_encoders, unet, **conv).save_weights(tmp_path / "w.safetensors", None, None)
    state, alphas = StableDiffusionXLPipeline.lora_state_dict(
        str(tmp_path), weight_name="w.safetensors", unet_config=their_unet.config
    )
    StableDiffusionXLPipeline.load_lora_into_unet(state, network_alphas=alphas, unet=their_unet)
    for prefix, encoder in zip(("text_encoder", "text_encoder_2"), their_encoders):
        StableDiffusionXLPipeline.load_lora_into_text_encoder(
            state, network_alphas=alphas, text_encoder=encoder, prefix=prefix
        )
    x, context, ids = torch.randn(1, 4, 8, 8), torch.randn(1, 77, 48), torch.arange(77).unsqueeze(0)
    added = {"text_embeds": torch.randn(1, 32), "time_ids": torch.ones(1, 6)}

    def outputs(unet, encoders):
        with torch.no_grad():
            hidden = [encoder(ids, output_hidden_states=True).hidden_states[-1] for encoder in encoders]
            return [*hidden, unet(x, torch.tensor([500]), context, added_cond_kwargs=added).sample]

    for theirs, ours in zip(outputs(their_unet, their_encoders), outputs(unet, text_encoders)):
        assert (theirs - ours).abs().max() < 1e-4
    for plain, ours in zip(outputs(*make_tiny_sdxl()), outputs(unet, text_encoders)):
        assert (plain - ours).abs().max() > 1e-2
