"""What --network_args mean for ranks, alphas and rates of each block; no model needed."""

from __future__ import annotations

import logging
import math

import pytest

from library.errors import OptionError
from library.key_values import parse_strings
from networks import lora_blocks
from networks.lora_blocks import block_plan, get_block_dims_and_alphas, get_block_lr_weight, read_network_arguments


def plan(is_sdxl: bool = False, rank: int = 4, alpha: float = 1.0, **arguments: str) -> lora_blocks.BlockPlan:
    return block_plan(rank, alpha, read_network_arguments(arguments), is_sdxl)


DOWN_1 = "lora_unet_down_blocks_0_attentions_0_proj_in"  # block 1
MID = "lora_unet_mid_block_attentions_0_proj_in"  # block 12
TEXT = "lora_te_text_model_encoder_layers_0_mlp_fc1"


def by_block(count: int, **special: str) -> str:
    return ",".join(special.get(f"b{index}", "2") for index in range(count))


def test_every_key_has_a_reader_and_a_field():
    assert set(lora_blocks.READERS) == set(lora_blocks.NetworkArguments.__dataclass_fields__)


def test_without_arguments_every_layer_has_the_rank_of_the_network_and_convolutions_none():
    simple = plan(rank=8, alpha=3.0)
    assert simple.rank_and_alpha(DOWN_1, False) == simple.rank_and_alpha(TEXT, False) == (8, 3.0)
    assert simple.rank_and_alpha(DOWN_1, True) == (0, None)
    assert not simple.with_convolutions


def test_convolutions_have_their_own_rank_and_alpha_1_by_default():
    assert plan(rank=8, conv_dim="2").rank_and_alpha(DOWN_1, True) == (2, 1.0)
    assert plan(rank=8, conv_dim="2", conv_alpha="3").rank_and_alpha(DOWN_1, True) == (2, 3.0)
    assert plan(rank=8, conv_dim="2").rank_and_alpha(DOWN_1, False) == (8, 1.0)


def test_block_lists_concern_the_unet_only_and_alphas_default_to_the_network():
    listed = plan(rank=8, alpha=3.0, block_dims=by_block(25, b1="16", b12="0"))
    assert listed.rank_and_alpha(DOWN_1, False) == (16, 3.0)
    assert listed.rank_and_alpha(MID, False) == (0, 3.0)
    assert listed.rank_and_alpha(TEXT, False) == (8, 3.0)


def test_a_list_of_alphas_alone_acts():
    listed = plan(rank=8, block_alphas=by_block(25, b1="5"), conv_dim="3", conv_block_alphas=by_block(25, b12="7"))
    assert listed.rank_and_alpha(DOWN_1, False) == (8, 5.0)
    assert listed.rank_and_alpha(MID, True) == (3, 7.0)


def test_convolution_ranks_of_blocks_switch_convolutions_on():
    listed = plan(conv_block_dims=by_block(25, b1="6", b12="0"))
    assert listed.with_convolutions
    assert listed.rank_and_alpha(DOWN_1, True) == (6, 1.0)
    assert listed.rank_and_alpha(MID, True)[0] == 0


def test_blocks_with_factor_0_get_no_lora():
    weighted = plan(mid_lr_weight="0.05", block_lr_zero_threshold="0.1")
    assert weighted.rank_and_alpha(MID, False) == (0, None)
    assert weighted.rank_and_alpha(DOWN_1, False) == (4, 1.0)


@pytest.mark.parametrize("is_sdxl,count", [(False, 12), (True, 9)])
@pytest.mark.parametrize(
    "name,formula",
    [
        ("cosine", lambda i, n: math.sin(math.pi / 2 * (n - 1 - i) / (n - 1))),
        ("sine", lambda i, n: math.sin(math.pi / 2 * i / (n - 1))),
        ("linear", lambda i, n: i / (n - 1)),
        ("reverse_linear", lambda i, n: 1 - i / (n - 1)),
        ("zeros", lambda i, n: 0.0),
    ],
)
def test_presets_are_their_formulas(name, formula, is_sdxl, count):
    weights = get_block_lr_weight(is_sdxl, f"{name}+0.25", None, None, 0.0)
    first = 1 if is_sdxl else 0
    assert weights[first : first + count] == pytest.approx([formula(i, count) + 0.25 for i in range(count)])
    assert weights[first + count :] == [1.0] * (len(weights) - first - count)
    assert len(weights) == (23 if is_sdxl else 25)


def test_short_lists_are_filled_long_ones_cut_and_empty_elements_are_0(caplog):
    weights = get_block_lr_weight(False, "0.5,,2", "3", ",".join(["4"] * 14), 0.0)
    assert weights == [0.5, 0.0, 2.0, *[1.0] * 9, 3.0, *[4.0] * 12]
    assert "missing ones are 1" in caplog.text and "the rest is cut" in caplog.text


def test_factors_up_to_the_threshold_are_0():
    assert get_block_lr_weight(False, "0.1,0.2,0.3", None, None, 0.2)[:4] == [0.0, 0.0, 0.3, 1.0]
    assert get_block_lr_weight(False, None, None, None, 0.2) is None


def test_lists_of_numbers_are_taken_like_texts():
    assert get_block_dims_and_alphas(True, [2] * 23, None, 4, 1, None, None, 3, None) == (
        *([2] * 23, [1.0] * 23),
        *([3] * 23, [1.0] * 23),
    )
    assert get_block_lr_weight(True, [0.5] * 9, [1, 2, 3], None, 0.0)[:13] == [1.0, *[0.5] * 9, 1, 2, 3]


@pytest.mark.parametrize("ratio,expected", [({}, (None, None)), ({"loraplus_lr_ratio": "4"}, (4.0, 4.0))])
def test_one_ratio_serves_both_parts_and_its_own_wins(ratio, expected):
    ratios = plan(**ratio)
    assert (ratios.unet_ratio, ratios.text_encoder_ratio) == expected
    own = plan(**ratio, loraplus_unet_lr_ratio="0", loraplus_text_encoder_lr_ratio="7")
    assert (own.unet_ratio, own.text_encoder_ratio) == (0.0, 7.0)


@pytest.mark.parametrize(
    "arguments,match",
    [
        ({"conv_dims": "4"}, "Did you mean 'conv_dim'"),
        ({"drop_out": "0.1"}, "Did you mean 'dropout'"),
        ({"algo": "lokr"}, "networks.lora has no 'algo'"),
        ({"conv_dim": "None"}, "conv_dim=None is not readable"),
        ({"conv_dim": "4.5"}, "conv_dim=4.5 is not readable"),
        ({"conv_dim": "-4"}, "0 or above"),
        ({"conv_alpha": "nan"}, "finite"),
        ({"rank_dropout": "1.5"}, r"\[0, 1\)"),
        ({"module_dropout": "1"}, r"\[0, 1\)"),
        ({"loraplus_lr_ratio": "-1"}, "0 or above"),
        ({"block_dims": "1,2"}, "2 values, this model has 25"),
        ({"block_dims": "1,,2"}, "not readable"),
        ({"conv_block_alphas": by_block(25)}, "needs conv_dim"),
        ({"down_lr_weight": "1"}, "cosine"),
        ({"down_lr_weight": "cosinus"}, "Did you mean 'cosine'"),
        ({"down_lr_weight": "cosine+much"}, "not readable"),
        ({"mid_lr_weight": "cosine"}, "1 numbers"),
        ({"up_lr_weight": "1,2,inf"}, "not finite"),
    ],
)
def test_mistakes_are_told_in_one_line_before_there_is_a_model(arguments, match):
    with pytest.raises(OptionError, match=match) as raised:
        plan(**arguments)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("rank,alpha", [(0, 1.0), (-1, 1.0), (4, -1.0), (4, math.nan)])
def test_impossible_ranks_and_alphas_are_refused(rank, alpha):
    with pytest.raises(OptionError, match=r"--network_(dim|alpha)"):
        plan(rank=rank, alpha=alpha)


def test_keys_of_other_modules_pass_where_they_ask_for_nothing(caplog):
    caplog.set_level(logging.INFO)
    items = ["conv_dim=0", "conv_alpha=0", "use_cp=False", "factor=0", "train_norm=False", "conv_dim=8", "dropout=0"]
    arguments = read_network_arguments(parse_strings(items, "--network_args"))
    assert arguments.conv_dim == 8 and arguments.dropout == 0.0
    assert "conv_dim=8 wins" in caplog.text and "networks.lora has no use_cp" in caplog.text


def test_words_that_a_front_end_left_in_are_refused_by_name():
    for item in ("conv_dim=undefined", "conv_dim="):
        with pytest.raises(OptionError, match=item):
            parse_strings([item, "conv_dim=16"], "--network_args")


@pytest.mark.parametrize("off", [{}, {"conv_dim": "0"}], ids=["absent", "zero"])
def test_an_alpha_that_acts_on_nothing_is_said(off, caplog):
    assert not plan(conv_alpha="4", **off).with_convolutions
    assert read_network_arguments(off).conv_dim is None
    assert "no effect without conv_dim" in caplog.text
