"""The table of old names: every entry exists, importing it is light, and what is called behaves."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from argparse import ArgumentParser, Namespace

import pytest
import torch

from library import train_util
from library.noise import noise_schedule
from tests.conftest import REPOSITORY, SPECIFICATION_FIXTURES, spec_fixture
from tests.test_layering import TABLES
from tests.training import make_tiles


def table(module: str):
    return importlib.import_module(f"library.{module}")


@pytest.mark.parametrize("module,name", [(m, n) for m in sorted(TABLES) for n in table(m).NAMES])
def test_every_old_name_exists(module, name):
    assert getattr(table(module), name) is not None
    assert name in dir(table(module))


@pytest.mark.parametrize("module", sorted(TABLES))
def test_importing_it_costs_nothing(module):
    code = (
        f"import sys; import library.{module}; heavy = {{'torch', 'numpy', 'PIL'}} & set(sys.modules); assert not heavy"
    )
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True)


def test_an_unknown_name_is_an_attribute_error_that_helps():
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = train_util.no_such_thing
    with pytest.raises(AttributeError, match=r"library\.dataset\.TrainingData"):
        _ = train_util.DreamBoothDataset
    assert not hasattr(train_util, "sample_images")
    assert not set(train_util.GONE) & set(train_util.NAMES)


def test_every_name_of_the_specification_is_kept_or_gone_with_a_word():
    """The tables of names that other programs import, read from the specification."""
    path = SPECIFICATION_FIXTURES.parent / "compat.md"
    if not path.is_file():
        pytest.skip("the specification of names is not beside this checkout")
    text = path.read_text(encoding="utf-8")
    section = text[text.index("## 2. Optimizer functions") : text.index("## 5. train_network")]
    found = set(re.findall(r"\b([a-z_]+(?:_[a-z0-9]+)+)\(", section))
    names = set().union(*(table(module).NAMES for module in TABLES), train_util.GONE)
    assert found - names <= {"add_config_arguments", "get_last_lr"}


@pytest.mark.parametrize(
    "name,path",
    [
        ("", "torch.optim.adamw.AdamW"),
        ("AdamW8bit", "bitsandbytes.optim.adamw.AdamW8bit"),
        ("lion", "lion_pytorch.lion_pytorch.Lion"),
        ("SGD", "torch.optim.sgd.SGD"),
        ("prodigy", "prodigyopt.prodigy.Prodigy"),
    ],
)
def test_get_optimizer_gives_name_arguments_and_the_real_class(name, path):
    parser = ArgumentParser()
    train_util.add_optimizer_arguments(parser)
    args = parser.parse_args(["--optimizer_type", name] if name else [])
    args.learning_rate = 1.0
    found, text, optimizer = train_util.get_optimizer(args, [torch.nn.Parameter(torch.zeros(4, 4))])
    assert (found, text) == (path, "")
    assert f"{type(optimizer).__module__}.{type(optimizer).__name__}" == path


def test_a_filter_reaches_the_optimizer_through_the_old_name():
    from library import grad_filter

    args = Namespace(
        optimizer_type="AdamW",
        optimizer_args=["weight_decay=0.1", "grad_filter=topk", "grad_filter.keep=0.5"],
        learning_rate=1e-3,
        lr_scheduler="constant",
    )
    _, text, optimizer = train_util.get_optimizer(args, [torch.nn.Parameter(torch.zeros(16, 16))])
    assert type(optimizer) is torch.optim.AdamW and grad_filter.handle_of(optimizer) is not None
    assert text.startswith("weight_decay=0.1") and "grad_filter" in text
    assert args.optimizer_args == ["weight_decay=0.1", "grad_filter=topk", "grad_filter.keep=0.5"]


# ------------------------------------------------------------------------------------------------ what is called


class Scheduler:
    """As much of a Diffusers scheduler as the old functions look at."""

    def __init__(self):
        schedule = noise_schedule()
        self.betas, self.alphas_cumprod = schedule.betas, schedule.alphas_cumprod


TIMESTEPS = torch.tensor([0, 400, 999])


@pytest.mark.parametrize("prepared", [False, True])
def test_loss_weights_of_old_names(prepared):
    functions, scheduler = table("custom_train_functions"), Scheduler()
    if prepared:
        functions.prepare_scheduler_for_custom_training(scheduler, "cpu")
        assert scheduler.all_snr.shape == (1000,)
    alphas = scheduler.alphas_cumprod.double()[TIMESTEPS]
    snr = alphas / (1 - alphas)
    capped, loss = snr.clamp(max=1000), torch.ones(3)
    expected = {
        functions.apply_snr_weight(loss, TIMESTEPS, scheduler, 5.0): snr.clamp(max=5) / snr,
        functions.apply_snr_weight(loss, TIMESTEPS, scheduler, 5.0, True): snr.clamp(max=5) / (snr + 1),
        functions.scale_v_prediction_loss_like_noise_prediction(loss, TIMESTEPS, scheduler): capped / (capped + 1),
        functions.add_v_prediction_like_loss(loss, TIMESTEPS, scheduler, 0.5): 1 + 0.5 * (capped + 1) / capped,
        functions.apply_debiased_estimation(loss, TIMESTEPS, scheduler): capped**-0.5,
    }
    for found, value in expected.items():
        torch.testing.assert_close(found.double(), value, rtol=1e-4, atol=1e-7)


def test_zero_terminal_snr_of_old_names():
    functions, scheduler = table("custom_train_functions"), Scheduler()
    functions.fix_noise_scheduler_betas_for_zero_terminal_snr(scheduler)
    ours = noise_schedule(zero_terminal_snr=True)
    assert scheduler.alphas_cumprod[-1] == 0 and torch.equal(scheduler.betas, ours.betas)
    torch.testing.assert_close(torch.cumprod(scheduler.alphas, 0), scheduler.alphas_cumprod)


def test_noise_of_old_names():
    args = options_of("--noise_offset", "0.1", "--min_timestep", "10", "--max_timestep", "20")
    latents = torch.randn(4, 4, 8, 8)
    noise, noisy, timesteps = train_util.get_noise_noisy_latents_and_timesteps(args, Scheduler(), latents)
    assert ((timesteps >= 10) & (timesteps < 20)).all()
    level = Scheduler().alphas_cumprod[timesteps].reshape(-1, 1, 1, 1)
    torch.testing.assert_close(noisy, level.sqrt() * latents + (1 - level).sqrt() * noise)
    functions = table("custom_train_functions")
    shifted = functions.apply_noise_offset(latents, torch.zeros_like(latents), 1.0, None)
    assert (shifted.std(dim=(2, 3)) < 1e-6).all() and functions.apply_noise_offset(latents, noise, None, None) is noise
    assert abs(functions.pyramid_noise_like(noise, "cpu", 3, 0.4).std() - 1) < 1e-3


def test_losses_of_old_names():
    prediction, target = torch.tensor([[[[3.0]]]]), torch.tensor([[[[1.0]]]])
    assert train_util.conditional_loss(prediction, target, "l2", "mean") == 4
    assert train_util.conditional_loss(prediction, target, "l1", "none").shape == (1, 1, 1, 1)
    args = options_of("--loss_type", "huber", "--huber_schedule", "constant", "--huber_c", "0.5")
    threshold = train_util.get_huber_threshold_if_needed(args, TIMESTEPS[:1], Scheduler())
    loss = train_util.conditional_loss(prediction, target, "huber", "sum", threshold)
    torch.testing.assert_close(loss, torch.tensor(2 * 0.5 * ((4 + 0.25) ** 0.5 - 0.5)))
    assert train_util.get_huber_threshold_if_needed(options_of(), TIMESTEPS, Scheduler()) is None
    mask = {"alpha_masks": torch.zeros(1, 8, 8)}
    assert table("custom_train_functions").apply_masked_loss(torch.ones(1, 4, 1, 1), mask).sum() == 0
    recorder = train_util.LossRecorder()
    for epoch, losses in enumerate(([1.0, 3.0], [5.0])):
        for step, value in enumerate(losses):
            recorder.add(epoch=epoch, step=step, loss=value)
    assert recorder.moving_average == 4.0


def options_of(*words: str) -> Namespace:
    from library.args import script_parser

    return script_parser("train_network").parse_args(list(words))


def test_names_of_files_of_old_names():
    args = options_of("--output_name", "x", "--save_every_n_epochs", "2", "--save_last_n_epochs", "1")
    args.save_every_n_steps, args.save_last_n_steps = 10, 20
    assert train_util.get_epoch_ckpt_name(args, ".safetensors", 4) == "x-000004.safetensors"
    assert train_util.get_step_ckpt_name(args, ".ckpt", 30) == "x-step00000030.ckpt"
    assert train_util.get_last_ckpt_name(args, ".safetensors") == "x.safetensors"
    assert (train_util.get_remove_epoch_no(args, 4), train_util.get_remove_step_no(args, 50)) == (2, 20)


def test_hashes_and_metadata_of_old_names(tmp_path):
    import hashlib

    from safetensors.torch import save_file

    tensors = {"a": torch.arange(12.0)}
    path = tmp_path / "ü.safetensors"
    new, old = train_util.precalculate_safetensors_hashes(tensors, {"ss_x": "1", "other": "2"})
    save_file(tensors, path, metadata={"ss_x": "1"})
    assert train_util.calculate_sha256(str(path)) == hashlib.sha256(path.read_bytes()).hexdigest()
    assert old == train_util.model_hash(str(path)) and len(new) == 64
    assert train_util.load_metadata_from_safetensors(str(path)) == {"ss_x": "1"}
    assert train_util.load_metadata_from_safetensors("x.ckpt") == {}
    found = train_util.build_minimum_network_metadata(False, "sd_v1", "networks.lora", "4", "1", {"conv_dim": "2"})
    assert set(found) == set(train_util.SS_METADATA_MINIMUM_KEYS)
    assert table("model_util").is_safetensors("A.SAFETENSORS") and not table("model_util").is_safetensors("a.ckpt")


def test_step_counts_as_a_front_end_computes_them():
    """What one backend does before a run: buckets, images put into them, batches counted."""
    manager = train_util.BucketManager(False, (512, 512), 256, 1024, 64)
    manager.make_buckets()
    for size in [(512, 512), (512, 500), (1024, 256)]:
        reso, _, _ = manager.select_bucket(*size)
        manager.add_image(reso, "name")
    assert sorted(len(bucket) for bucket in manager.buckets) == [1, 2]
    assert table("model_util").make_bucket_resolutions((512, 512)) == manager.predefined_resos
    manager = train_util.BucketManager(False, (512, 512), 256, 1024, 64)
    manager.set_predefined_resos([(512, 512), (256, 1024)])
    assert manager.select_bucket(200, 900)[0] == (256, 1024)


def test_data_set_configs_of_old_names(tmp_path):
    from library import config_util

    make_tiles(tmp_path)
    args = options_of("--resolution", "64", "--train_batch_size", "2")
    train_util.prepare_dataset_args(args, True)
    assert args.resolution == (64, 64)
    subsets = config_util.generate_dreambooth_subsets_config_by_subdirs(str(tmp_path))
    config = {"datasets": [{"subsets": subsets}]}
    generator = config_util.BlueprintGenerator(config_util.ConfigSanitizer(True, False, False, True))
    group, validation = config_util.generate_dataset_group_by_blueprint(generator.generate(config, args).dataset_group)
    assert (len(group), validation) == (3, None)  # 3 images, twice each, 2 in a batch


def test_prompts_of_old_names(tmp_path):
    (tmp_path / "p.txt").write_text("a cat --n a dog --w 64 --d 3\n# no\na tree\n", encoding="utf-8")
    first, second = train_util.load_prompts(str(tmp_path / "p.txt"))
    assert (first["prompt"], first["negative_prompt"], first["width"], first["seed"]) == ("a cat", "a dog", 64, 3)
    assert (first["enum"], second["enum"]) == (0, 1) and "seed" not in second
    assert train_util.line_to_prompt_dict("a cat --s 7")["sample_steps"] == 7


def test_models_of_old_names(tiny_sd1_folder, tmp_path):
    from library.checkpoint import load_model, save_single_file

    model = load_model(tiny_sd1_folder, "sd1", dtype=torch.float32)
    save_single_file(tmp_path / "m.safetensors", model, "sd1")
    util = table("model_util")
    encoder, vae, unet = util.load_models_from_stable_diffusion_checkpoint(False, str(tmp_path / "m.safetensors"))
    assert torch.equal(next(unet.parameters()), next(model.unet.parameters()))
    assert type(encoder).__name__ == "CLIPTextModel" and type(vae).__name__ == "AutoencoderKL"
    assert util.get_model_version_str_for_sd1_sd2(True, True) == "sd_v2_v"
    args = options_of("--pretrained_model_name_or_path", str(tiny_sd1_folder), "--sdpa")
    accelerator = Namespace(device=torch.device("cpu"))
    _, _, unet, single = train_util.load_target_model(args, torch.bfloat16, accelerator)
    assert not single and unet.dtype == torch.bfloat16
    train_util.replace_unet_modules(unet, False, False, True)
    assert {type(value).__name__ for value in unet.attn_processors.values()} == {"AttnProcessor2_0"}


def test_rates_of_old_names():
    optimizer = torch.optim.SGD([{"params": [torch.zeros(1)], "lr": 0.5}, {"params": [torch.zeros(1)], "lr": 0.25}])
    scheduler = train_util.get_dummy_scheduler(optimizer)
    logs: dict[str, float] = {}
    train_util.append_lr_to_logs(logs, scheduler, "AdamW", including_unet=False)
    assert logs == {"lr/text_encoder1": 0.5, "lr/text_encoder2": 0.25}


def test_old_set_up_of_logging_keeps_the_handlers_of_a_process():
    import logging

    before = list(logging.getLogger().handlers)
    assert before  # pytest's own
    table("utils").setup_logging()
    assert logging.getLogger().handlers == before


def test_contradictions_are_found_by_the_old_check():
    with pytest.raises(ValueError, match="noise_offset"):
        train_util.verify_training_args(options_of("--adaptive_noise_scale", "0.1"))
    train_util.verify_training_args(options_of())


def test_the_scaler_takes_half_gradients():
    weight = torch.nn.Parameter(torch.ones(4, dtype=torch.float16))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    train_util.patch_accelerator_for_fp16_training(Namespace(scaler=scaler))
    optimizer = torch.optim.SGD([weight], lr=0.25)
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert (weight == 0.75).all()
    train_util.patch_accelerator_for_fp16_training(Namespace(scaler=None))


# ------------------------------------------------------------------------------------------------------------ SDXL


def test_size_embeddings_of_old_names():
    listed = spec_fixture("numerics.json")["sdxl_size_embedding"]
    sizes = [torch.tensor([listed[name]]) for name in ("original_hw", "crop_top_left", "target_hw")]
    found = table("sdxl_train_util").get_size_embeddings(*sizes, "cpu")
    assert list(found.shape) == listed["shape"]
    for index, value in listed["index_value"].items():
        assert abs(float(found[0, int(index)]) - value) < 1e-4


def test_sdxl_models_of_old_names(tiny_sdxl_folder):
    util = table("sdxl_model_util")
    first, second, vae, unet, _, info = util.load_models_from_sdxl_checkpoint(
        util.MODEL_VERSION_SDXL_BASE_V1_0, str(tiny_sdxl_folder), "cpu", torch.bfloat16
    )
    assert hasattr(second, "text_projection") and not hasattr(first, "text_projection") and info is None
    assert vae.dtype == unet.dtype == torch.bfloat16
    ours = unet.state_dict()
    files = util.convert_diffusers_unet_state_dict_to_sdxl(ours)
    assert "input_blocks.0.0.weight" in files and len(files) == len(ours)
    back = util.convert_sdxl_unet_state_dict_to_diffusers(files)
    assert back.keys() == ours.keys() and all(back[key] is files_value for key, files_value in back.items())
    assert util.VAE_SCALE_FACTOR == 0.13025
    assert util.make_unet_conversion_map()["input_blocks.0.0"] == "conv_in"


def test_sdxl_options_of_old_names():
    parser = ArgumentParser()
    util = table("sdxl_train_util")
    util.add_sdxl_training_arguments(parser)
    args = parser.parse_args(["--cache_text_encoder_outputs_to_disk"])
    args.v2 = False
    util.verify_sdxl_training_args(args)
    assert args.cache_text_encoder_outputs
    args.v2 = True
    with pytest.raises(ValueError, match="--v2"):
        util.verify_sdxl_training_args(args)


@pytest.mark.parametrize(
    "sdxl,lora,expected", [(False, True, "stable-diffusion-v1/lora"), (True, False, "stable-diffusion-xl-v1-base")]
)
def test_model_spec_of_old_names(sdxl, lora, expected):
    args = options_of("--output_name", "x", "--metadata_author", "me", "--resolution", "640,512")
    found = train_util.get_sai_model_spec(None, args, sdxl, lora, False, is_stable_diffusion_ckpt=not lora)
    assert (found["modelspec.architecture"], found["modelspec.author"]) == (expected, "me")
    assert (found["modelspec.title"], found["modelspec.resolution"]) == ("x", "640x512")
