"""A run from parsed options to files: check everything, build the parts, restore a state, run the loop, save."""

from __future__ import annotations

import copy
import functools
import importlib
import logging
import random
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from library import grad_filter, metadata, settings, state
from library.accelerator import (
    DDP_TIMEOUT_MIN,
    DTYPES,
    allow_half_gradients,
    build_accelerator,
    check_precision,
)
from library.args import check_options, with_defaults
from library.batch_loss import BatchResult
from library.checkpoint import LoadedModel, find_model
from library.dataset import TrainingData, check_images
from library.dataset_view import show_dataset
from library.errors import ErrorCollector, OptionError
from library.fused_steps import FusedSteps
from library.hub import HubUploads, copies_to, download_state, hub_api, read_hub_settings
from library.key_values import as_items, parse_strings
from library.latent_cache import cache_latents
from library.loop import LoopSettings, LoopSteps, TrainedParts, TrainingLoop
from library.model_families import SD, SDXL, ModelFamily
from library.naming import OutputNames
from library.optimizers import check_optimizer, evaluation_weights, get_optimizer
from library.output import RunOutput
from library.processes import (
    Share,
    agree_on_facts,
    ends_with_the_others,
    from_main_process,
    own_random_numbers,
    processes_of_launcher,
    same_weights,
)
from library.run_data import described_data, find_data
from library.run_plan import RunPlan, Update, initial_step
from library.run_saver import RunSaver
from library.sampling import SamplePrompt, generate_samples, load_prompts
from library.schedulers import check_scheduler, get_scheduler_fix, move_schedule, put_schedule_in_force
from library.signals import SIGNALS_TOGETHER_S, StopRequest
from library.text_cache import cache_text_outputs
from library.trackers import LogSettings, ScalarLog, read_log_settings
from library.trainer_hooks import TrainerHooks
from library.user_dataset import UserData
from library.validation import Validation, validation_timesteps
from networks import foreign

log = logging.getLogger(__name__)

SAVE_DTYPES = {None: None, "float": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass
class Checked:
    """What the first look at options and files gave, before anything heavy is loaded."""

    model_path: Path
    data: TrainingData | UserData
    validation: TrainingData | None
    prompts: list[SamplePrompt]
    resume: Path | None
    record: state.StateRecord | None
    seed: int

    def data_sets(self) -> list[Any]:
        """Give what is trained on, and what is validated with where there is such a part."""
        return [self.data] + ([self.validation] if self.validation else [])


@dataclass
class OptimizerParts:
    """What :meth:`NetworkTrainer.create_optimizer` gives; ``arguments`` as recorded, the rest as in TrainedParts."""

    name: str
    arguments: str
    optimizer: Any
    raw_optimizer: Any
    scheduler: Any
    fused: FusedSteps | None


class NetworkTrainer(TrainerHooks):
    """Trains a network module on a frozen base model.

    Attributes:
        family: the kind of base model; a subclass names another one. script: key of the table of command lines.
        architecture_suffix: behind the modelspec name of the base model. tracker_name: last level of the log folder.
    """

    family: ModelFamily = SD
    script = "train_network"
    architecture_suffix = "/lora"
    tracker_name = "network_train"

    def train(self, args: Namespace) -> None:
        """Run everything that the options ask for.

        Raises:
            OptionError: a mistake in options or files. RunStopped: the run had to end early.
        """
        args = self.complete(args)
        with ends_with_the_others(args.ddp_timeout or DDP_TIMEOUT_MIN, several=processes_of_launcher() > 1):
            self._train(args)

    def _train(self, args: Namespace) -> None:
        started_at = time.time()
        checked = self._check(args)
        if args.debug_dataset:
            show_dataset(checked.data, Path(args.output_dir) / f"{args.output_name or 'last'}-debug_dataset")
            return
        precision = settings.read_precision(args)
        logs = read_log_settings(args, self.tracker_name)
        accelerator = build_accelerator(
            precision.mixed,
            logs,
            ddp_timeout_min=args.ddp_timeout,
            ddp_gradient_as_bucket_view=args.ddp_gradient_as_bucket_view,
            ddp_static_graph=args.ddp_static_graph,
        )
        if precision.full == "fp16":
            allow_half_gradients(accelerator)
        if accelerator.num_processes > 1:
            log.info("%d processes, %s", accelerator.num_processes, accelerator.state.backend)
            checked = self._agreed(args, checked)
        _seed_everything(checked.seed)
        length = settings.read_length(args)
        plan = RunPlan.from_limits(
            len(checked.data), accelerator.num_processes, length.accumulation, length.max_steps, length.max_epochs
        )
        for data in checked.data_sets():
            data.max_train_steps = plan.max_steps
        resumed = checked.record.current_step if checked.record else None
        done, source = initial_step(plan, resumed, length.initial_step, length.initial_epoch)

        model = self._load_model(args, checked, precision, accelerator)
        for data in checked.data_sets():
            data.tokenize = self.get_tokenize_strategy(args).tokenize
        network, network_args = self.create_network(args, model, precision, accelerator)
        parts, optimizer_name, optimizer_args = self._create_optimizer(args, network, model, accelerator, plan)
        if args.cache_latents or args.cache_latents_to_disk:
            self._refuse_strategy(self.get_latents_caching_strategy(args), "latents")
            for data in checked.data_sets():
                self._cache_latents(args, data, model, accelerator)
        for data in checked.data_sets():
            self.cache_text_encoder_outputs_if_needed(
                args, accelerator, model.unet, model.vae, model.text_encoders, data, DTYPES[precision.mixed]
            )
        if not accelerator.is_main_process:  # everything up to here is alike, noise must not be
            own_random_numbers(checked.seed, accelerator.process_index)
        if checked.record is not None:
            self._resume(checked, parts, accelerator, plan, optimizer_name)
        log.info(
            "training starts after step %d of %d (%s), epoch %d", done, plan.max_steps, source, plan.epoch_after(done)
        )

        facts = metadata.RunFacts(
            session_id=random.SystemRandom().randint(0, 2**32),
            started_at=started_at,
            version=self._version,
            architecture=self.family.architecture(args.v2, args.v_parameterization) + self.architecture_suffix,
            implementation=self.family.implementation[not self.architecture_suffix],
            resolution=self.family.resolution(args.v2, args.v_parameterization),
            optimizer=optimizer_name,
            optimizer_args=optimizer_args,
            max_steps=plan.max_steps,
            epochs=plan.epochs,
            batches_per_epoch=plan.batches,
            seed=checked.seed,
            network_args=network_args,
            dataset=described_data(args, checked.data, checked.validation, plan.processes * plan.accumulation),
            grad_filter=handle.metadata() if (handle := grad_filter.handle_of(parts.raw_optimizer)) else {},
        )
        self._run(args, accelerator, plan, checked, model, parts, precision, logs, facts, done)

    # ------------------------------------------------------------------------------------------- before loading

    def complete(self, args: Namespace) -> Namespace:
        """Give the options with the defaults of those that this script does not have."""
        return with_defaults(args)

    def _check_family(self, args: Namespace) -> None:
        if args.v2 and self.family.kind(True) == self.family.kind(False):
            raise OptionError(f"--v2 is for Stable Diffusion 2.x, not for {self.family.name}. Leave it out")
        if args.clip_skip and not self.family.layer_of_text:
            log.warning("--clip_skip has no effect: %s always takes the layer before the last", self.family.name)

    def check_filter(self, args: Namespace) -> None:
        """Refuse a gradient filter that cannot be read."""
        try:
            spec = grad_filter.spec_from_args(args)
            chains = [spec.chain, *(target.chain for target in spec.targets if target.chain)] if spec else []
            stages = {stage.name: grad_filter.resolve(stage.name).target for chain in chains for stage in chain.stages}
        except grad_filter.GradFilterError as error:
            raise OptionError(str(error)) from error
        watching = [name for name, stage in stages.items() if getattr(stage, "watches_micro_steps", False)]
        if watching and processes_of_launcher() > 1:
            raise OptionError(
                f"--grad_filter {watching[0]} counts the batches of one process only, so several would choose "
                f"differently. Train in one process, or take another filter"
            )

    def check_network(self, args: Namespace) -> None:
        """Refuse network options that cannot be used."""
        settings.read_trained_parts(args)
        if (args.cache_text_encoder_outputs or args.cache_text_encoder_outputs_to_disk) and (
            not args.network_train_unet_only
        ):
            raise OptionError(
                "--cache_text_encoder_outputs needs --network_train_unet_only: text encoders that are trained have to "
                "be run. Add it, or leave the cache out"
            )
        _network_module(args.network_module)
        arguments = parse_strings(args.network_args, "--network_args")
        if args.network_module == "networks.lora":
            from networks.lora_blocks import block_plan, read_network_arguments

            is_sdxl = self.family.kind(args.v2) == "sdxl"
            block_plan(args.network_dim, args.network_alpha, read_network_arguments(arguments), is_sdxl=is_sdxl)

    def _check(self, args: Namespace) -> Checked:
        """Look at everything that can be wrong and is cheap to look at; report all mistakes together."""
        check_options(args, self.script)
        errors = ErrorCollector()
        precision = settings.read_precision(args)
        found: dict[str, Any] = {"prompts": [], "resume": None, "record": None, "validation": None}
        with errors.check():
            read_log_settings(args, self.tracker_name)
        with errors.check():
            read_hub_settings(args)
        with errors.check():
            check_precision(precision.mixed, precision.full)
        with errors.check():
            self._check_family(args)
        _check_optimizer(args, errors)
        with errors.check():
            self.check_filter(args)
        with errors.check():
            self.check_network(args)
        with errors.check():
            found["model_path"] = find_model(args.pretrained_model_name_or_path)
            self.family.check(found["model_path"], self.family.kind(args.v2))
        if args.sample_prompts:
            with errors.check():
                found["prompts"] = load_prompts(args.sample_prompts)
        if args.resume:
            with errors.check():
                asked = args.resume
                if args.resume_from_huggingface:
                    asked = str(download_state(asked, args.huggingface_token))
                found["resume"], found["record"] = state.find_state(asked, Path(args.output_dir), args.output_name)
        found["seed"] = _choose_seed(args.seed, found["record"])
        with errors.check():
            found["data"], found["validation"] = find_data(args, found["seed"], self.family.bucket_divisor)
            check_images([data for data in (found["data"], found["validation"]) if data])
            if args.cache_latents or args.cache_latents_to_disk:
                found["data"].check_cacheable()
            if args.cache_text_encoder_outputs or args.cache_text_encoder_outputs_to_disk:
                found["data"].check_text_cacheable()
            self.assert_extra_args(args, found["data"], found["validation"])
        errors.raise_if_any()
        return Checked(**found)

    def _agreed(self, args: Namespace, checked: Checked) -> Checked:
        """Give every process the seed of process 0, where no option says one, and see that they found the same."""
        seed = from_main_process(checked.seed)
        if seed != checked.seed:
            data, validation = find_data(args, seed, self.family.bucket_divisor)
            checked = replace(checked, seed=seed, data=data, validation=validation)
        resumed = checked.record.current_step if checked.record else "none"
        agree_on_facts({"the step of the resumed state": resumed, "the number of batches": len(checked.data)})
        return checked

    # ------------------------------------------------------------------------------------------------- the parts

    def base_dtype(self, precision: settings.PrecisionSettings) -> torch.dtype:
        """Give the dtype that the base model is loaded in."""
        return DTYPES[precision.mixed]

    def _load_model(
        self, args: Namespace, checked: Checked, precision: settings.PrecisionSettings, accelerator: Any
    ) -> LoadedModel:
        dtype, own = DTYPES[precision.mixed], self.base_dtype(precision)
        self._version, encoders, vae, unet = self.load_target_model(args, own, accelerator)
        encoders = list(encoders) if isinstance(encoders, (list, tuple)) else [encoders]
        if unet is None:
            unet, encoders = self.load_unet_lazily(args, own, accelerator, encoders)
        known = self._loaded or LoadedModel([], [], None, None, checked.model_path.is_file(), checked.model_path)
        tokenizers = self.get_tokenizers(self.get_tokenize_strategy(args))
        model = replace(known, text_encoders=list(encoders), vae=vae, unet=unet, tokenizers=tokenizers)
        if self.cast_vae(args):
            torch.nn.Module.to(model.vae, torch.float32 if precision.no_half_vae else dtype)
        cast = [model.unet] if self.cast_unet(args) else []
        for module in cast + (model.text_encoders if self.cast_text_encoder(args) else []):
            torch.nn.Module.to(module, own)
        for module in (model.unet, model.vae, *model.text_encoders):
            module.to(accelerator.device)
        if self.is_text_encoder_not_needed_for_training(args):
            for encoder in model.text_encoders:
                encoder.to("cpu")
        model.unet = self.prepare_unet_with_accelerator(args, accelerator, model.unet)
        if args.base_weights:
            self._merge_base_weights(args, model, dtype, accelerator)
        if precision.gradient_checkpointing:
            model.unet.train()
            model.unet.enable_gradient_checkpointing()
            for index, encoder in enumerate(model.text_encoders):
                encoder.train()
                encoder.gradient_checkpointing_enable()
                self.prepare_text_encoder_grad_ckpt_workaround(index, encoder)
        self._loaded = model
        return model

    def _merge_base_weights(self, args: Namespace, model: LoadedModel, dtype: torch.dtype, accelerator: Any) -> None:
        module = _network_module(args.network_module)
        encoders = _encoders_argument(model)
        multipliers = list(args.base_weights_multiplier or ())
        for index, file in enumerate(args.base_weights):
            multiplier = multipliers[index] if index < len(multipliers) else 1.0
            with foreign.shown_to(args.network_module, encoders, model.unet) as (shown_encoders, shown_unet):
                network, tensors = module.create_network_from_weights(
                    multiplier, file, model.vae, shown_encoders, shown_unet, for_inference=True
                )
            network.merge_to(encoders, model.unet, tensors, dtype, accelerator.device)
            log.info("merged %s into the base model with strength %g", file, multiplier)

    def create_network(
        self, args: Namespace, model: LoadedModel, precision: settings.PrecisionSettings, accelerator: Any
    ) -> tuple[Any, dict[str, str]]:
        """Give the network, attached to the model, and the arguments of it that are recorded."""
        module = _network_module(args.network_module)
        arguments = parse_strings(args.network_args, "--network_args")
        extra = {"dropout": args.network_dropout, **arguments}
        encoders = _encoders_argument(model)
        with foreign.shown_to(args.network_module, encoders, model.unet) as (shown_encoders, shown_unet):
            if args.dim_from_weights:
                network, _ = module.create_network_from_weights(
                    1.0, args.network_weights, model.vae, shown_encoders, shown_unet, **extra
                )
            else:
                network = module.create_network(
                    1.0,
                    args.network_dim,
                    args.network_alpha,
                    model.vae,
                    shown_encoders,
                    shown_unet,
                    neuron_dropout=args.network_dropout,
                    **extra,
                )
        if network is None:
            raise OptionError(f"--network_module {args.network_module} made no network. Check --network_args")
        if args.network_module != foreign.OWN:
            foreign.use_reference_keys(network, encoders, model.unet)
        if hasattr(network, "prepare_network"):
            network.prepare_network(args)
        if args.scale_weight_norms and not hasattr(network, "apply_max_norm_regularization"):
            raise OptionError(f"--scale_weight_norms: {args.network_module} cannot do it. Leave it out")
        self.post_process_network(args, accelerator, network, encoders, model.unet)
        trains_text_encoder, trains_unet = settings.read_trained_parts(args)
        network.apply_to(encoders, model.unet, trains_text_encoder, trains_unet)
        if args.network_weights:
            foreign.load_weights(network, args.network_weights)
        if precision.gradient_checkpointing:
            network.enable_gradient_checkpointing()
        if precision.full is not None:
            network.to(DTYPES[precision.full])
        return network, arguments

    def _create_optimizer(
        self, args: Namespace, network: Any, model: LoadedModel, accelerator: Any, plan: RunPlan
    ) -> tuple[TrainedParts, str, str]:
        network.prepare_grad_etc(model.text_encoders, model.unet)
        # on its device; not for DDP, which averages nothing here and would keep buckets of every gradient's size
        network = accelerator.unwrap_model(accelerator.prepare_model(network, evaluation_mode=True))
        if plan.processes > 1:
            same_weights(network)
        groups, descriptions = _parameter_groups(network, settings.read_network_rates(args))
        groups = [{**group, "params": list(group["params"])} for group in groups]
        if not any(group["params"] for group in groups):
            raise OptionError(
                "nothing is trained: every learning rate is 0. Check --learning_rate, --unet_lr, --text_encoder_lr and "
                "--network_train_unet_only"
            )
        names = _tagged_names(network, groups)
        log.info("prepare optimizer, %d tensors", len(names))
        built = self.create_optimizer(args, groups, names, accelerator, plan)
        if args.save_state or args.save_state_on_train_end:
            state.check_state_can_be_read_back(built.raw_optimizer)
        parts = TrainedParts(
            network,
            list(getattr(network, "stored_modules", [network])),
            model.text_encoders,
            model.unet,
            built.optimizer,
            built.raw_optimizer,
            built.scheduler,
            names,
            descriptions,
            built.fused,
        )
        for description, group in zip(descriptions, groups):
            log.info("learning rate of %s: %s", description, group["lr"])
        return parts, built.name, built.arguments

    def create_optimizer(
        self, args: Namespace, groups: Sequence[dict[str, Any]], names: Sequence[str], accelerator: Any, plan: RunPlan
    ) -> OptimizerParts:
        """Build optimizer and schedule, prepared by accelerate.

        Args:
            groups: parameter groups with lists of parameters. names: of all their parameters in order.
        """
        name, text, raw = get_optimizer(args, groups)
        scheduler = get_scheduler_fix(args, raw, accelerator.num_processes, plan.max_steps)
        optimizer = accelerator.prepare(raw)
        if hasattr(scheduler, "state_dict"):
            scheduler = accelerator.prepare(scheduler)
        return OptimizerParts(name, text, optimizer, raw, scheduler, None)

    def _cache_latents(self, args: Namespace, data: TrainingData, model: LoadedModel, accelerator: Any) -> None:
        vae = model.vae

        def encode(images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            with torch.no_grad():
                posterior = vae.encode(images.to(accelerator.device, vae.dtype)).latent_dist
            return posterior.mean.float(), posterior.std.float()

        identity = metadata.model_hashes(Path(args.vae or args.pretrained_model_name_or_path))[1]
        if not args.vae and model.source.is_dir():
            weights = sorted((model.source / "vae").glob("*.safetensors"))
            identity = metadata.model_hashes(weights[0])[1] if weights else str(model.source.name)
        cache_latents(
            data,
            encode,
            batch_size=args.vae_batch_size,
            to_disk=args.cache_latents_to_disk,
            vae=f"{identity} {vae.dtype}",
            suffix=f"_{self.family.cache_suffix}.npz",
            trust_files=args.skip_cache_check,
            shown=accelerator.is_main_process,
            share=Share.of_process(),
        )

    def _cache_text_outputs(self, args: Namespace, data: TrainingData, model: LoadedModel, accelerator: Any) -> None:
        for encoder in model.text_encoders:
            encoder.to(accelerator.device)

        def encode(captions: list[str]) -> list[torch.Tensor]:
            if args.weighted_captions:
                ids, weights = self.family.tokenize_with_weights(model.tokenizers, captions, args.max_token_length)
            else:
                ids, weights = self.family.tokenize(model.tokenizers, captions, args.max_token_length), []
            ids = [each.to(accelerator.device) for each in ids]
            with torch.no_grad(), accelerator.autocast():
                return self.family.encode_weighted(model.text_encoders, ids, weights, None)

        files = [model.source] if model.source.is_file() else sorted(model.source.glob("text_encoder*/*.safetensors"))
        hashes = " ".join(metadata.model_hashes(path)[1] for path in files)
        data.text_names = self.family.text_outputs
        cache_text_outputs(
            data,
            encode,
            self.family.text_outputs,
            batch_size=args.vae_batch_size,
            to_disk=args.cache_text_encoder_outputs_to_disk,
            encoders=f"{hashes or model.source.name} {model.text_encoders[0].dtype} {args.max_token_length}"
            + " weighted" * args.weighted_captions,
            trust_files=args.skip_cache_check,
            shown=accelerator.is_main_process,
            share=Share.of_process(),
        )
        for encoder in model.text_encoders:  # nothing needs them until a preview is drawn
            encoder.to("cpu")

    # ---------------------------------------------------------------------------------------------------- resume

    def _resume(
        self, checked: Checked, parts: TrainedParts, accelerator: Any, plan: RunPlan, optimizer_name: str
    ) -> None:
        folder, record = checked.resume, checked.record
        assert folder is not None and record is not None
        state.check_optimizer_matches(record, optimizer_name, parts.names)
        other_count = record.processes != plan.processes
        sizes = (record.batches, record.processes, record.accumulation)
        if record.version and sizes != (plan.batches, plan.processes, plan.accumulation):
            log.warning(
                "the state was made with %s batches an epoch, %s processes, accumulation %s; now %d, %d, %d: "
                "the step number goes on, the place in the data is another one",
                *sizes,
                *(plan.batches, plan.processes, plan.accumulation),
            )
        base = [group.get("initial_lr", group.get("lr")) for group in parts.raw_optimizer.param_groups]
        state.load_state(
            folder,
            load_weights=lambda tensors: _load_exactly(parts.stored, tensors, folder),
            optimizer=parts.raw_optimizer,
            scheduler=parts.scheduler if hasattr(parts.scheduler, "state_dict") else None,
            scaler=accelerator.scaler,
            rank=None if other_count else accelerator.process_index,
        )
        if other_count:
            log.warning("random numbers start anew in every process, as the state is of %d", record.processes)
            own_random_numbers(checked.seed, accelerator.process_index, record.current_step)
        _put_rates_in_force(parts, base)
        for scheduler in _raw_schedulers(parts):
            if other_count:
                move_schedule(scheduler, record.current_step * plan.processes)
            put_schedule_in_force(scheduler, (plan.max_steps - record.current_step) * plan.processes)
        log.info("resumed from %s", folder)
        state.report_restored(record, plan, grad_filter.handle_of(parts.raw_optimizer) is not None)

    # ------------------------------------------------------------------------------------------------------- run

    def model_suffix(self, args: Namespace) -> str:
        """Give the suffix of model files, empty for folders."""
        return f".{args.save_model_as}"

    def _run(
        self,
        args: Namespace,
        accelerator: Any,
        plan: RunPlan,
        checked: Checked,
        model: LoadedModel,
        parts: TrainedParts,
        precision: settings.PrecisionSettings,
        logs: LogSettings,
        facts: metadata.RunFacts,
        done: int,
    ) -> None:
        self._facts = facts
        saving = settings.read_saving(args)
        names = OutputNames(saving.folder, saving.name, self.model_suffix(args))
        entries = metadata.run_metadata(args, facts)
        self.update_metadata(entries, args)
        saver = RunSaver(
            accelerator,
            plan,
            parts,
            facts.optimizer,
            checked.seed,
            SAVE_DTYPES[saving.precision],
            entries,
            self.get_sai_model_spec(args),
            args.no_metadata,
        )
        interval = plan.save_interval_for_ratio(saving.epoch_ratio) if saving.epoch_ratio else saving.every_n_epochs
        hub = read_hub_settings(args) if accelerator.is_main_process else None
        uploads = HubUploads(hub, hub_api(hub.token)) if hub else None
        output = RunOutput(
            saving,
            names,
            interval,
            saver.write_model,
            saver.write_state,
            removes=accelerator.is_main_process,
            saved=copies_to(uploads, names.final_model()),
        )
        previews = settings.read_samples(args)

        def draw(epoch: int | None, step: int) -> None:
            every = previews.every_n_epochs if epoch is not None else previews.every_n_steps
            number = epoch if epoch is not None else step
            due = previews.at_first if number == 0 else bool(every) and number % (every or 1) == 0
            if not (due and checked.prompts and accelerator.is_main_process):
                return
            log.info("generating sample images at step %s: %d", "of epoch end" if epoch else "", step)
            with evaluation_weights(parts.raw_optimizer), accelerator.autocast():
                generate_samples(
                    checked.prompts,
                    functools.partial(self.family.pipeline, model),
                    (model.unet, model.vae, *model.text_encoders, parts.network),
                    previews.sampler,
                    args.v_parameterization,
                    lambda index, seed: names.sample(index, epoch, step, seed),
                    accelerator.device,
                    functools.partial(self.family.embed, model, args.max_token_length, args.clip_skip),
                    self._scalars.show_sample if self._scalars else None,
                )

        self._draw, self._scalars = draw, ScalarLog(accelerator, logs)

        def sample(epoch: int | None, step: int) -> None:
            self.sample_images(
                accelerator,
                args,
                epoch,
                step,
                accelerator.device,
                model.vae,
                model.tokenizers,
                _encoders_argument(model),
                model.unet,
            )

        stop = StopRequest(SIGNALS_TOGETHER_S if plan.processes > 1 else 0.0)
        loss_of_batch = self._loss_of_batch(args, accelerator, model, parts, DTYPES[precision.mixed])
        loop = TrainingLoop(
            accelerator,
            plan,
            checked.data,
            parts,
            LoopSteps(
                loss_of_batch,
                functools.partial(self.all_reduce_network, accelerator),
                sample,
                functools.partial(self._report_step, args, accelerator, parts),
                functools.partial(self._report_epoch, accelerator),
                self._validate(args, accelerator, checked, model, parts, DTYPES[precision.mixed], loss_of_batch, stop),
            ),
            output,
            LoopSettings(
                workers=args.max_data_loader_n_workers,
                persistent_workers=args.persistent_data_loader_workers,
                max_grad_norm=args.max_grad_norm,
                scale_weight_norms=args.scale_weight_norms,
                check_ranks=args.check_ranks,
            ),
            losses=checked.record.losses if checked.record else (),
            stop=stop,
        )
        saver.average = loop.average
        self.after_update(args, parts, done)
        if done == 0:
            sample(0, 0)
        record = checked.record
        at_epoch_end = done > 0 and plan.update(done).ends_epoch
        epoch_end_due = bool(record and record.version and at_epoch_end and not record.epoch_ended)
        try:
            with stop:
                last = loop.run(done, epoch_end_due)
                output.at_end(last)
        finally:
            self._scalars.close()
            if uploads is not None:
                uploads.close()
        if loop.filters and accelerator.is_main_process:
            _draw_filter_pictures(loop.filters[0], names.pictures())
        if loop.check is not None:
            log.info("--check_ranks: %d checksums were the same in every process", loop.check.compared)
        log.info("training is finished: %d steps", last.step)

    def _loss_of_batch(
        self, args: Namespace, accelerator: Any, model: LoadedModel, parts: TrainedParts, dtype: torch.dtype
    ) -> Callable[..., BatchResult]:
        """Give the forward pass of a batch; with a timestep it is one of the validation, at that timestep."""
        scheduler = self.get_noise_scheduler(args, accelerator.device)
        encoding, tokenizing = self.get_text_encoding_strategy(args), self.get_tokenize_strategy(args)
        trains_text_encoder = any(self.get_text_encoders_train_flags(args, model.text_encoders))
        trains_unet = settings.read_trained_parts(args)[1]

        def loss_of_batch(batch: dict[str, Any], timestep: int | None = None) -> BatchResult:
            is_train = timestep is None
            own = args if is_train else Namespace(**{**vars(args), "min_timestep": timestep, "max_timestep": timestep})
            self._details = None
            self.on_step_start(own, accelerator, parts.network, model.text_encoders, model.unet, batch, dtype, is_train)
            loss = self.process_batch(
                batch,
                model.text_encoders,
                model.unet,
                parts.network,
                model.vae,
                scheduler,
                model.vae.dtype,
                dtype,
                accelerator,
                own,
                encoding,
                tokenizing,
                is_train=is_train,
                train_text_encoder=trains_text_encoder,
                train_unet=trains_unet,
            )
            if self._details is None:  # a subclass whose batch is all its own tells the filters no single losses
                return BatchResult(loss, loss.detach().new_empty(0), torch.empty(0, dtype=torch.long))
            return BatchResult(loss, self._details.losses, self._details.timesteps)

        return loss_of_batch

    def _validate(
        self,
        args: Namespace,
        accelerator: Any,
        checked: Checked,
        model: LoadedModel,
        parts: TrainedParts,
        dtype: torch.dtype,
        loss_of_batch: Callable[..., BatchResult],
        stop: StopRequest,
    ) -> Callable[[Update, bool, float], None]:
        """Give what measures the loss on held-out images when it is due, and logs it."""
        if checked.validation is None:
            return lambda update, at_epoch_end, training_loss: None
        noise = settings.read_noise(args)
        modules = (model.unet, model.vae, *model.text_encoders, parts.network)
        validation = Validation(
            checked.validation,
            settings.read_validation(args, checked.seed),
            validation_timesteps(noise.min_timestep, noise.max_timestep),
            modules,
            lambda batch, timestep: float(loss_of_batch(batch, timestep).loss),
            lambda batch: self.on_validation_step_end(
                args, accelerator, parts.network, model.text_encoders, model.unet, batch, dtype
            ),
            workers=args.max_data_loader_n_workers,
            stopping=lambda: bool(stop.number),
        )

        def validate(update: Update, at_epoch_end: bool, training_loss: float) -> None:
            if validation.due(update, at_epoch_end):
                with evaluation_weights(parts.raw_optimizer):
                    self._log_validation(accelerator, validation, update, at_epoch_end, training_loss)

        return validate

    def _report_step(
        self,
        args: Namespace,
        accelerator: Any,
        parts: TrainedParts,
        update: Update,
        loss: float,
        mean_loss: float,
        norms: dict[str, float],
        of_step: dict[str, float],
    ) -> None:
        self.after_update(args, parts, update.step)
        logs = self.generate_step_logs(
            args,
            loss,
            mean_loss,
            parts.scheduler,
            parts.descriptions,
            parts.raw_optimizer,
            norms.get("Keys Scaled"),
            norms.get("Average key norm"),
            norms.get("max_key_norm"),
        )
        self.step_logging(accelerator, {**logs, **of_step}, update.step, update.epoch)

    def after_update(self, args: Namespace, parts: TrainedParts, step: int) -> None:
        """Called after each update, and once before the first with the number of updates that are behind."""

    def _report_epoch(self, accelerator: Any, update: Update, mean_loss: float) -> None:
        self.epoch_logging(accelerator, {self.loss_scalars.epoch: mean_loss}, update.step, update.epoch)


class SdxlNetworkTrainer(NetworkTrainer):
    """Trains a network module on a frozen SDXL."""

    family = SDXL
    script = "sdxl_train_network"


# --------------------------------------------------------------------------------------------------------- helpers


def _seed_everything(seed: int) -> None:
    from accelerate.utils import set_seed

    set_seed(seed)


def _choose_seed(asked: int | None, record: state.StateRecord | None) -> int:
    recorded = record.seed if record else None
    if asked is None:
        return random.SystemRandom().randint(0, 2**32 - 1) if recorded is None else recorded
    if recorded is not None and recorded != asked:
        log.warning("--seed %d is in force, the state was made with %d: the data order changes", asked, recorded)
    return asked


def _draw_filter_pictures(handle: grad_filter.FilterHandle, folder: Path) -> None:
    try:
        for picture in handle.save_pictures(folder):
            log.info("picture of the gradient filter: %s", picture)
    except Exception as error:  # everything that matters is saved by now
        log.warning("no picture of the gradient filter: %s: %s", type(error).__name__, error)


def _check_optimizer(args: Namespace, errors: ErrorCollector) -> None:
    """Try optimizer and schedule on a few numbers: what is wrong is known before a model is loaded."""
    probe = copy.copy(args)
    words = as_items(args.optimizer_args)
    probe.optimizer_args = [word for word in words if not word.lstrip("'").startswith("grad_filter")]
    optimizer = None
    with errors.check():
        optimizer, probe.lr_scheduler = check_optimizer(probe, settings.read_part_rates(args))
    with errors.check():
        check_scheduler(probe, optimizer)


def _network_module(name: str) -> Any:
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise OptionError(f"--network_module {name}: cannot import it ({error}). Example: networks.lora") from error
    if not hasattr(module, "create_network"):
        raise OptionError(f"--network_module {name} has no create_network. Example: networks.lora")
    return module


def _encoders_argument(model: LoadedModel) -> Any:
    """Give the text encoders as network modules expect them: one alone, several as a list."""
    return model.text_encoders[0] if len(model.text_encoders) == 1 else model.text_encoders


def _parameter_groups(network: Any, rates: dict[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    build = getattr(network, "prepare_optimizer_params_with_multiple_te_lrs", None)
    if build is not None:
        result = build(**rates)
    else:
        text_rate = rates["text_encoder_lr"][0] if rates["text_encoder_lr"] else None
        try:
            result = network.prepare_optimizer_params(text_rate, rates["unet_lr"], rates["default_lr"])
        except TypeError:
            result = network.prepare_optimizer_params(text_rate, rates["unet_lr"])
    if isinstance(result, tuple):
        return list(result[0]), list(result[1])
    return list(result), [f"group{index}" for index in range(len(result))]


def _tagged_names(network: Any, groups: Sequence[dict[str, Any]]) -> list[str]:
    """Name every trained tensor, for the gradient filter and for the record of a state, in the optimizer's order."""
    by_id = {id(param): name for name, param in network.named_parameters()}
    for param, name, role, block in foreign.parameter_tags(network):
        by_id[id(param)] = name
        grad_filter.tag_parameter(param, name, role, block)
    return [by_id[id(param)] for group in groups for param in group["params"]]


def _load_exactly(modules: Sequence[Any], tensors: Sequence[dict[str, torch.Tensor]], folder: Path) -> None:
    try:
        for module, own in zip(modules, tensors, strict=True):
            module.load_state_dict(own)
    except (RuntimeError, ValueError) as error:
        lines = str(error).strip().splitlines()
        reason = lines[1].strip() if len(lines) > 1 else lines[0]
        raise OptionError(
            f"--resume: the weights in {folder} do not fit this network ({reason[:120]}). Use the network options of "
            f"the first run"
        ) from error


def _raw_schedulers(parts: TrainedParts) -> list[Any]:
    """Give the schedules below accelerate's wrapper, one for each optimizer."""
    scheduler = getattr(parts.scheduler, "scheduler", parts.scheduler)
    return getattr(scheduler, "schedulers", [scheduler])


def _put_rates_in_force(parts: TrainedParts, base: Sequence[float | None]) -> None:
    """Let the command line's learning rates win over those of the state, with a line where they differ."""
    optimizers = getattr(parts.raw_optimizer, "optimizers", [parts.raw_optimizer])
    pairs = zip(optimizers, _raw_schedulers(parts))
    places = [(group, each, index) for raw, each in pairs for index, group in enumerate(raw.param_groups)]
    for (group, its_scheduler, index), asked in zip(places, base):
        saved = group.get("initial_lr", group.get("lr"))
        if asked is None or saved is None or saved == asked:
            continue
        log.warning(
            "learning rate of %s: %g of the command line is in force, the state was made with %g",
            parts.descriptions[min(index, len(parts.descriptions) - 1)],
            asked,
            saved,
        )
        group["lr"] = group["lr"] * (asked / saved) if saved else asked
        if "initial_lr" in group:
            group["initial_lr"] = asked
        if hasattr(its_scheduler, "base_lrs"):
            its_scheduler.base_lrs[index] = asked
