"""Preview images: prompts are read and checked before the first step; drawing them never disturbs or ends a run."""

from __future__ import annotations

import json
import logging
import random
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from library.errors import OptionError, did_you_mean
from library.files import write_file
from library.noise import BETA_END, BETA_START, TRAIN_STEPS

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SamplePrompt:
    """One preview image. Sizes in pixels, multiples of 8; ``seed`` None draws one that is not repeatable."""

    prompt: str
    negative_prompt: str = ""
    width: int = 512
    height: int = 512
    sample_steps: int = 30
    scale: float = 7.5
    seed: int | None = None
    sample_sampler: str | None = None


# Diffusers class and what it needs beside the noise schedule
SAMPLERS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddim": ("DDIMScheduler", {"clip_sample": True}),
    "pndm": ("PNDMScheduler", {"skip_prk_steps": True}),  # the other way needs four steps to begin
    "lms": ("LMSDiscreteScheduler", {}),
    "euler": ("EulerDiscreteScheduler", {}),
    "euler_a": ("EulerAncestralDiscreteScheduler", {}),
    "heun": ("HeunDiscreteScheduler", {}),
    "dpm_2": ("KDPM2DiscreteScheduler", {}),
    "dpm_2_a": ("KDPM2AncestralDiscreteScheduler", {}),
    "dpmsolver": ("DPMSolverMultistepScheduler", {"algorithm_type": "dpmsolver", "final_sigmas_type": "sigma_min"}),
    "dpmsolver++": ("DPMSolverMultistepScheduler", {"algorithm_type": "dpmsolver++"}),
    "dpmsingle": ("DPMSolverSinglestepScheduler", {}),
}
ALIASES = {f"k_{name}": name for name in ("lms", "euler", "euler_a", "dpm_2", "dpm_2_a")}


def build_sampler(name: str, v_parameterization: bool) -> Any:
    """Build the Diffusers scheduler of a sampler name; an unknown one becomes ddim, with a line."""
    import diffusers

    known = ALIASES.get(name, name)
    if known not in SAMPLERS:
        log.warning("--sample_sampler %s is not known,%s ddim is used", name, did_you_mean(name, SAMPLERS))
        known = "ddim"
    class_name, settings = SAMPLERS[known]
    return getattr(diffusers, class_name)(
        num_train_timesteps=TRAIN_STEPS,
        beta_start=BETA_START,
        beta_end=BETA_END,
        beta_schedule="scaled_linear",
        prediction_type="v_prediction" if v_parameterization else "epsilon",
        **settings,
    )


# ---------------------------------------------------------------------------------------------------------- prompts


def _size(text: str) -> int:
    return max(64, int(text) // 8 * 8)


def _steps(text: str) -> int:
    return min(1000, max(1, int(text)))


LINE_OPTIONS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "w": ("width", _size),
    "h": ("height", _size),
    "d": ("seed", int),
    "s": ("sample_steps", _steps),
    "l": ("scale", float),
    "n": ("negative_prompt", str),
    "ss": ("sample_sampler", str),
}
UNUSED_LINE_OPTIONS = ("cn", "g", "ctr", "rcfg", "fs")


def line_to_prompt(line: str) -> SamplePrompt:
    """Read one line of a prompt file: the prompt, then options introduced by `` --``.

    An option that cannot be read is left out with a line; the prompt itself is never read as an option.
    """
    text, *options = re.split(r"\s--(?=\w)", line.strip())
    values: dict[str, Any] = {}
    for option in options:
        letter, _, value = option.strip().partition(" ")
        letter, value = letter.lower(), value.strip()
        if letter in UNUSED_LINE_OPTIONS:
            continue
        if letter not in LINE_OPTIONS:
            log.warning("sample prompt: --%s is not known and left out", letter)
            continue
        key, read = LINE_OPTIONS[letter]
        try:
            values[key] = read(value)
        except ValueError:
            log.warning("sample prompt: --%s %s is not a number and left out", letter, value)
    return SamplePrompt(text.strip(), **values)


def _of_table(entry: Any, shared: Mapping[str, Any], source: str) -> SamplePrompt | None:
    if isinstance(entry, str):
        return line_to_prompt(entry)
    if not isinstance(entry, dict) or not str({**shared, **entry}.get("prompt", "")):
        log.warning("%s: an entry without a prompt is left out", source)
        return None
    values = {**shared, **entry}
    readers = dict(LINE_OPTIONS.values())
    known = {
        key: value for key, value in values.items() if key in SamplePrompt.__dataclass_fields__ and value is not None
    }
    try:
        return SamplePrompt(**{key: readers.get(key, str)(str(value)) for key, value in known.items()})
    except ValueError as error:
        log.warning("%s: an entry is left out (%s)", source, error)
        return None


def load_prompts(name: str) -> list[SamplePrompt]:
    """Read a prompt file (.toml, .json, anything else as lines).

    Args:
        name: its path. A prompt text in its place is reported, and the run goes on without previews.

    Raises:
        OptionError: the file is missing, unreadable or not UTF-8.
    """
    path = Path(name)
    if not path.is_file():
        if " --" in name or ("." not in name and " " in name):
            log.warning("--sample_prompts holds a prompt, not a file: no previews are made. Put it into a text file")
            return []
        raise OptionError(
            f"--sample_prompts {name}: there is no such file. Give a .txt, .toml or .json file of prompts"
        )
    try:
        text = path.read_bytes().decode("utf-8-sig")
        if path.suffix.lower() == ".toml":
            import toml

            table = toml.loads(text).get("prompt", {})
            shared = {key: value for key, value in table.items() if key != "subset"}
            entries: Sequence[Any] = table.get("subset", [])
        elif path.suffix.lower() == ".json":
            shared, entries = {}, json.loads(text)
        else:
            lines = [line.strip() for line in text.splitlines()]
            shared, entries = {}, [line for line in lines if line and not line.startswith("#")]
    except UnicodeDecodeError as error:
        raise OptionError(f"--sample_prompts {name}: it is not UTF-8. Save it as UTF-8") from error
    except (ValueError, IndexError, TypeError, AttributeError) as error:
        raise OptionError(f"--sample_prompts {name}: it cannot be read ({error}). Check its syntax") from error
    if not isinstance(entries, list):
        raise OptionError(f"--sample_prompts {name}: a list of prompts is needed, found {type(entries).__name__}")
    prompts = [_of_table(entry, shared, f"--sample_prompts {name}") for entry in entries]
    return [prompt for prompt in prompts if prompt is not None]


# --------------------------------------------------------------------------------------------------------- drawing


@contextmanager
def undisturbed(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Put every random generator and every module's train mode back as it was when the block ends, however it ends."""
    import numpy

    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    modes = [(part, part.training) for module in modules for part in module.modules()]
    try:
        yield
    finally:
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if cuda:
            torch.cuda.set_rng_state_all(cuda)
        for part, training in modes:
            part.training = training


def generate_samples(
    prompts: Sequence[SamplePrompt],
    build_pipeline: Callable[[Any], Any],
    modules: Sequence[torch.nn.Module],
    sampler: str,
    v_parameterization: bool,
    target: Callable[[int, int | None], Path],
    device: torch.device,
    embed: Callable[[str, str], Mapping[str, Any]],
    show: Callable[[int, Path, str], None] | None = None,
) -> None:
    """Draw one image for each prompt; a failure is a warning.

    Args:
        prompts: what to draw. build_pipeline: called with a scheduler, gives a Diffusers pipeline.
        modules: whose train mode is restored. sampler: default name. target: path from (index, seed).
        device: of the generator. embed: called with prompt and negative prompt, gives the arguments for them.
        show: called with (index, path, prompt) of each image.
    """
    with undisturbed(modules):
        for module in modules:
            module.eval()
        for index, prompt in enumerate(prompts):
            try:
                pipeline = _pipeline_with(build_pipeline, prompt.sample_sampler or sampler, v_parameterization)
                path = _draw(pipeline, prompt, index, target, device, embed)
                log.info("sample image saved: %s", path)
                if show is not None:
                    show(index, path, prompt.prompt)
            except Exception as error:  # anything may go wrong in a pipeline; training is what counts
                log.warning("sample image %d is left out: %s: %s", index, type(error).__name__, str(error)[:200])


def _pipeline_with(build_pipeline: Callable[[Any], Any], sampler: str, v_parameterization: bool) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pipelines "correct" a schedule they are given and warn; it is set again below
        pipeline = build_pipeline(build_sampler(sampler, v_parameterization))
    pipeline.scheduler = build_sampler(sampler, v_parameterization)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _draw(
    pipeline: Any,
    prompt: SamplePrompt,
    index: int,
    target: Callable[[int, int | None], Path],
    device: torch.device,
    embed: Callable[[str, str], Mapping[str, Any]],
) -> Path:
    if prompt.seed is None:
        generator = torch.Generator(device=device)
        generator.seed()
    else:
        generator = torch.Generator(device=device).manual_seed(prompt.seed)
    with torch.no_grad():
        image = pipeline(
            **embed(prompt.prompt, prompt.negative_prompt),
            width=prompt.width,
            height=prompt.height,
            num_inference_steps=prompt.sample_steps,
            guidance_scale=prompt.scale,
            generator=generator,
        ).images[0]
    path = target(index, prompt.seed)
    write_file(path, lambda temporary: image.save(temporary, format="PNG"))
    return path
