"""A third party's subclass: every step that sd-scripts lets others replace is called, and what it does counts."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import sdxl_train_network
import train_network
from library.args import parse, script_parser
from library.errors import OptionError
from library.trainer import NetworkTrainer, SdxlNetworkTrainer
from library.trainer_hooks import TrainerHooks
from tests.conftest import SPECIFICATION_FIXTURES
from tests.test_train_network import metadata_of, scalars_of
from tests.training import RUN_OPTIONS, arguments, forget_accelerate, make_tiles

HOOKS = sorted(name for name, value in vars(TrainerHooks).items() if inspect.isfunction(value) and name[0] != "_")
# asked for by other parts of a run, or only where that part is used
NOT_IN_A_PLAIN_RUN = {
    "load_unet_lazily",
    "prepare_text_encoder_fp8",
    "prepare_text_encoder_grad_ckpt_workaround",
    "all_reduce_network",
    "get_text_encoder_outputs_caching_strategy",
    "on_validation_step_end",
    "val_logging",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return make_tiles(tmp_path_factory.mktemp("data"))


@pytest.fixture
def options(tiny_sd1_folder, data, tmp_path):
    return {
        "pretrained_model_name_or_path": tiny_sd1_folder,
        "train_data_dir": data,
        "output_dir": tmp_path / "out",
        "max_train_steps": 2,
        "cache_latents": False,
    }


def run(trainer: NetworkTrainer, options: dict[str, Any], script: str = "train_network") -> dict[str, torch.Tensor]:
    forget_accelerate()
    args = parse(script_parser(script), arguments({**RUN_OPTIONS, **options}))
    trainer.train(args)
    return load_file(Path(args.output_dir) / "t.safetensors")


def recording(base: type) -> type:
    """A subclass that overrides every step by one that notes the call and asks its parent."""

    def step(name: str):
        def noted(self, *args, **kwargs):
            self.called.append(name)
            return getattr(base, name)(self, *args, **kwargs)

        return noted

    def begin(self):
        base.__init__(self)
        self.called: list[str] = []

    return type("Recording", (base,), {"__init__": begin, **{name: step(name) for name in HOOKS}})


def test_signatures_are_those_of_the_specification():
    path = SPECIFICATION_FIXTURES.parent / "compat.md"
    if not path.is_file():
        pytest.skip("the specification of names is not beside this checkout")
    text = path.read_text(encoding="utf-8")
    section = text[text.index("## 5. train_network") : text.index("Module function")]
    listed = re.findall(r"\b([a-z_0-9]+)\(([^()]*)\)", section[section.index("| method |") :])
    seen = set()
    for name, parameters in listed:
        if not hasattr(TrainerHooks, name) or "same without" in parameters:
            continue
        ours = list(inspect.signature(getattr(TrainerHooks, name)).parameters)[1:]
        theirs = [word.split("=")[0].strip().lstrip("*") for word in parameters.split(",")]
        assert ours[: len(theirs)] == theirs or name in ("prepare_text_encoder_fp8", "get_tokenizers"), name
        seen.add(name)
    assert seen >= set(HOOKS) - {"on_validation_step_end", "epoch_logging", "val_logging", "step_logging"}, (
        set(HOOKS) - seen
    )


@pytest.mark.parametrize(
    "extra", [{}, {"cache_latents": True, "gradient_checkpointing": True}], ids=["plain", "cached"]
)
def test_a_subclass_that_asks_its_parent_everywhere_changes_no_bit(extra, options, tmp_path):
    plain = run(NetworkTrainer(), {**options, **extra})
    trainer = recording(NetworkTrainer)()
    found = run(trainer, {**options, **extra, "output_dir": tmp_path / "b"})
    assert plain.keys() == found.keys() and all(torch.equal(plain[key], found[key]) for key in plain)
    missing = set(HOOKS) - set(trainer.called) - NOT_IN_A_PLAIN_RUN
    missing -= {"encode_images_to_latents"} if extra else {"get_latents_caching_strategy"}
    if extra:
        assert "prepare_text_encoder_grad_ckpt_workaround" in trainer.called
    assert not missing
    assert trainer.called.count("process_batch") == 2 and trainer.called.count("step_logging") == 2


class ThirdParty(train_network.NetworkTrainer):
    """What such subclasses do: other latents, another prediction, own weights, metadata, logs and previews."""

    def __init__(self):
        super().__init__()
        self.vae_scale_factor = 0.5
        self.seen: dict[str, Any] = {"previews": []}

    def assert_extra_args(self, args, train_dataset_group, val_dataset_group):
        super().assert_extra_args(args, train_dataset_group, val_dataset_group)
        args.training_comment = "changed by a subclass"
        self.seen["images"] = len(train_dataset_group)

    def load_target_model(self, args, weight_dtype, accelerator):
        _, text_encoder, vae, unet = super().load_target_model(args, weight_dtype, accelerator)
        return "third_party_v1", [text_encoder], vae, unet

    def get_noise_pred_and_target(self, args, accelerator, noise_scheduler, latents, batch, *rest, **more):
        self.seen["scheduler"] = (noise_scheduler.config.num_train_timesteps, noise_scheduler.all_snr.shape)
        self.seen["latents"] = latents
        prediction, target, timesteps, _ = super().get_noise_pred_and_target(
            args, accelerator, noise_scheduler, latents, batch, *rest, **more
        )
        return prediction, target, timesteps, torch.full((len(target), 1, 1, 1), 0.25)

    def post_process_loss(self, loss, args, timesteps, noise_scheduler):
        self.seen.setdefault("losses", []).append(loss.detach().clone())
        return loss * 3.0

    def encode_images_to_latents(self, args, vae, images):
        return torch.ones_like(super().encode_images_to_latents(args, vae, images))

    def update_metadata(self, metadata, args):
        metadata["ss_third_party"] = "yes"

    def get_sai_model_spec(self, args):
        return {**super().get_sai_model_spec(args), "modelspec.architecture": "third-party/lora"}

    def generate_step_logs(self, args, current_loss, avr_loss, *rest, **more):
        return {**super().generate_step_logs(args, current_loss, avr_loss, *rest, **more), "third/party": 1.0}

    def sample_images(self, accelerator, args, epoch, global_step, *rest):
        self.seen["previews"].append((epoch, global_step))

    def post_process_network(self, args, accelerator, network, text_encoders, unet):
        self.seen["lora_name"] = network.unet_loras[0].lora_name
        assert "forward" not in vars(unet.conv_in)  # nothing is attached yet


def test_what_a_subclass_does_counts(options, tmp_path):
    trainer = ThirdParty()
    run(trainer, {**options, "logging_dir": tmp_path / "logs", "grad_filter": "topk"})
    seen = trainer.seen
    assert (seen["images"], seen["scheduler"]) == (6, (1000, (1000,)))
    assert (seen["latents"] == 0.5).all() and seen["lora_name"].startswith("lora_unet")
    found = metadata_of(tmp_path / "out" / "t.safetensors")
    assert (found["ss_third_party"], found["modelspec.architecture"]) == ("yes", "third-party/lora")
    assert (found["ss_training_comment"], found["ss_base_model_version"]) == ("changed by a subclass", "third_party_v1")
    scalars = scalars_of(tmp_path / "logs")
    assert [value for _, value in scalars["third/party"]] == [1.0, 1.0]
    for (_, logged), own in zip(scalars["loss/current"], seen["losses"]):
        assert abs(logged - 3.0 * float(own.mean())) < 1e-5
    assert any(name.startswith("grad_filter/") for name in scalars)
    assert (0, 0) in seen["previews"] and (None, 1) in seen["previews"]


def test_a_caching_strategy_of_its_own_is_refused_not_ignored(options):
    class Other(NetworkTrainer):
        def get_latents_caching_strategy(self, args):
            return object()

    with pytest.raises(OptionError, match="Other has a strategy of its own for caching latents"):
        run(Other(), {**options, "cache_latents": True})


def test_a_subclass_with_a_whole_batch_of_its_own(options):
    class Own(NetworkTrainer):
        def process_batch(self, batch, text_encoders, unet, network, *rest, **more):
            return sum((param**2).sum() for param in network.get_trainable_params())

    run(Own(), {**options, "grad_filter": "topk"})


def test_a_unet_that_comes_later(options):
    class Lazy(NetworkTrainer):
        def load_target_model(self, args, weight_dtype, accelerator):
            version, text_encoder, vae, self.kept = super().load_target_model(args, weight_dtype, accelerator)
            return version, text_encoder, vae, None

        def load_unet_lazily(self, args, weight_dtype, accelerator, text_encoders):
            return self.kept, text_encoders

    run(Lazy(), options)
    with pytest.raises(NotImplementedError, match="load_unet_lazily"):
        type("Bad", (Lazy,), {"load_unet_lazily": TrainerHooks.load_unet_lazily})().load_unet_lazily(
            None, None, None, []
        )


@pytest.mark.parametrize(
    "trainer,factor,is_sdxl",
    [(train_network.NetworkTrainer, 0.18215, False), (sdxl_train_network.SdxlNetworkTrainer, 0.13025, True)],
)
def test_attributes_after_construction(trainer, factor, is_sdxl):
    assert (trainer().vae_scale_factor, trainer().is_sdxl) == (factor, is_sdxl)
    assert issubclass(SdxlNetworkTrainer, NetworkTrainer)


def test_the_prediction_of_some_samples():
    class Unet:
        def __call__(self, noisy, timesteps, encoder_hidden_states, return_dict):
            return (noisy * timesteps.reshape(-1, 1, 1, 1) + encoder_hidden_states.mean(),)

    noisy, steps = torch.rand(3, 4, 2, 2), torch.tensor([1, 2, 3])
    conditions = [torch.zeros(3, 77, 8)]
    trainer = NetworkTrainer()
    every = trainer.call_unet(None, None, Unet(), noisy, steps, conditions, {}, torch.float32)
    some = trainer.call_unet(None, None, Unet(), noisy, steps, conditions, {}, torch.float32, indices=[0, 2])
    assert torch.equal(some, every[[0, 2]])


def test_a_wrapper_that_calls_train_with_a_hand_made_namespace(options, tmp_path):
    """Notebooks fill a namespace of their own: single values for lists, missing options of newer versions."""
    args = script_parser("train_network").parse_args(arguments({**RUN_OPTIONS, **options}))
    args.text_encoder_lr, args.network_args, args.optimizer_args = 1e-4, "conv_dim=2", "weight_decay=0.1"
    for name in (
        "grad_filter",
        "grad_filter_args",
        "grad_filter_targets",
        "console_log_simple",
        "resize_interpolation",
    ):
        delattr(args, name)
    forget_accelerate()
    train_network.NetworkTrainer().train(args)
    assert "weight_decay=0.1" in metadata_of(tmp_path / "out" / "t.safetensors")["ss_optimizer"]
