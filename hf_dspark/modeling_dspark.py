"""DSpark drafter: a parallel backbone that predicts a block, with small sequential and confidence heads."""

from __future__ import annotations

import copy
import json
import os
import shutil
import tempfile
import weakref
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from accelerate.utils import align_module_device
from huggingface_hub import save_torch_state_dict
from torch import nn
from torch.nn import functional as F
from transformers import GenerationConfig, PreTrainedModel
from transformers import __version__ as transformers_version
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, Qwen3RotaryEmbedding
from transformers.utils import GENERATION_CONFIG_NAME, ModelOutput, cached_file, logging

from . import hub
from .backbone.attention_mask import AttentionPattern, attention_masks, attention_patterns
from .backbone.context_cache import ContextCache
from .backbone.dflash2 import DFlash2DecoderLayer
from .backbone.gemma4 import Gemma4DecoderLayer
from .backbone.qwen3 import DSparkDecoderLayer
from .checkpoints import DROPPED, NATIVE, Checkpoint, writer
from .compat import resolve_revision
from .configuration_dspark import DSparkConfig
from .files import write_text, written_together
from .heads import SEQUENTIAL_HEADS, CandidateSelector, ConfidenceHead, CopyHead, MarkovHead
from .scheduling.calibration import Calibration
from .scheduling.costs import RoundCosts
from .scheduling.experience import Experience
from .scheduling.profile import HardwareProfile

logger = logging.get_logger(__name__)

BACKBONES: dict[str, type[nn.Module]] = {
    "qwen3": DSparkDecoderLayer,
    "gemma4": Gemma4DecoderLayer,
    "dflash2": DFlash2DecoderLayer,
}


@dataclass
class DSparkOutput(ModelOutput):
    """
    Args:
        last_hidden_state: h, the block's hidden states after the final norm, (R, block rows, hidden_size).
        cache: the context cache, which now holds the context rows that were passed.
    """

    last_hidden_state: torch.Tensor | None = None
    cache: ContextCache | None = None


class DSparkModel(PreTrainedModel):
    """
    A DSpark (or DFlash) drafter. Pass it as `assistant_model` to the `generate()` of the target it was trained for.

    What it has of its own follows its checkpoint; embeddings and output head that are missing are borrowed from the
    target by [`~DSparkModel.bind`], which `generate()` calls.

    `hardware_profile` says what rounds cost on the devices that were measured, and how confidences are calibrated;
    `None` if it came without one.
    How much of a draft is verified is what pays on this machine, by a hardware profile. Instead,
    `generation_config.num_assistant_tokens` sets how many tokens are sent to verification a round, and
    `generation_config.assistant_confidence_threshold` stops a draft at the first token whose confidence is lower.
    """

    config_class = DSparkConfig
    config: DSparkConfig
    base_model_prefix = ""
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = [layer.__name__ for layer in BACKBONES.values()]
    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = DROPPED
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        self.fc = nn.Linear(len(config.target_layer_ids) * config.target_hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        layer = BACKBONES[config.backbone]
        self.layers = nn.ModuleList([layer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        self.attention_patterns = attention_patterns(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if config.has_embed_tokens else None
        self.lm_head = (
            nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False) if config.has_lm_head else None
        )
        self.markov_head = SEQUENTIAL_HEADS[config.markov_head_type](config) if config.markov_rank else None
        self.candidate_selector = CandidateSelector(config) if config.selector_rank else None
        self.copy_head = CopyHead(config) if config.copy_ngram_size else None
        self.confidence_head = ConfidenceHead(config) if config.enable_confidence_head else None
        if config.draft_vocab_size < config.vocab_size:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        else:
            self.d2t = None
        self.generation_config = GenerationConfig()
        # Weights that are the target's, by module name. They are not ours to move, train or save, hence no parameters.
        self._shared: dict[str, torch.Tensor] = {}
        self._draft_ids: torch.Tensor | None = None  # by target id, -1 where there is none
        self._bound_to: tuple | None = None
        self._embedding_scale = config.input_embedding_scale  # until a target says, if it is to
        self.rounds: list | None = None  # where a trace collects what was drafted and accepted
        self.alternatives = 0  # how many likely tokens of every slot it collects, too
        self.round_costs: RoundCosts | None = None  # what a round takes on this machine, if that is known
        self._experience: dict[tuple[bool, int], Experience] = {}
        self.hardware_profile: HardwareProfile | None = None
        self.post_init()

    # Loading and saving

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, config=None, **kwargs):
        """
        Load a drafter in any of the formats of [`checkpoints`], from a folder or from the Hub. Takes the arguments of
        [`~transformers.PreTrainedModel.from_pretrained`].

        Raises:
            OSError: there is no such drafter.
            ValueError: the checkpoint is of an unknown format or of one that is not read, its config has fields of
                unknown effect, or its tensors are not those that its config calls for.
        """
        kwargs["revision"] = resolve_revision(pretrained_model_name_or_path, **kwargs)
        hub_arguments = {name: kwargs[name] for name in _HUB_ARGUMENTS if name in kwargs}
        checkpoint = Checkpoint(pretrained_model_name_or_path, **hub_arguments)
        if config is None:
            dtype = kwargs.pop("dtype", kwargs.pop("torch_dtype", None))  # "auto" is nothing for a config
            config, kwargs = DSparkConfig.from_dict(checkpoint.translate(), return_unused_kwargs=True, **kwargs)
            if dtype is not None:
                kwargs["dtype"] = dtype
        cls.check_tensors(config, checkpoint)
        kwargs |= {"use_safetensors": True, "key_mapping": checkpoint.key_mapping or None}
        loaded = super().from_pretrained(pretrained_model_name_or_path, *model_args, config=config, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        model._weight_conversions = None  # what is saved from now on has our names
        model._check_token_map()
        if cached_file(
            pretrained_model_name_or_path,
            GENERATION_CONFIG_NAME,
            _raise_exceptions_for_missing_entries=False,
            **hub_arguments,
        ):
            model.generation_config = GenerationConfig.from_pretrained(pretrained_model_name_or_path, **hub_arguments)
        try:
            profile = HardwareProfile.from_pretrained(pretrained_model_name_or_path, **hub_arguments)
            profile.check_positions(config.num_draft_tokens)
            model.hardware_profile = profile
        except OSError:  # there is none
            pass
        except ValueError as error:
            logger.warning(f"The drafter is used without its hardware profile. {error}")
        return loaded

    @classmethod
    def check_tensors(cls, config: DSparkConfig, checkpoint: Checkpoint) -> None:
        """
        Raises:
            ValueError: the checkpoint has other tensors than a drafter of that config.
        """
        try:
            with torch.device("meta"):
                expected = {name: tuple(tensor.shape) for name, tensor in cls(config).state_dict().items()}
        except (RuntimeError, TypeError, LookupError, ArithmeticError, AttributeError) as error:
            raise ValueError(
                f"The drafter that the config of {checkpoint.path} describes cannot be: {error}"
            ) from error
        found = checkpoint.tensors
        wrong = [f"{name} is missing" for name in expected.keys() - found.keys()]
        wrong += [f"{name} belongs to nothing" for name in found.keys() - expected.keys()]
        wrong += [
            f"{name} is {found[name]}, not {shape}"
            for name, shape in expected.items()
            if found.get(name, shape) != shape
        ]
        if wrong:
            raise ValueError(
                f"The checkpoint {checkpoint.path} does not hold the drafter that its config describes: "
                f"{'; '.join(sorted(wrong))}. "
                "Check the config's heads (`markov_rank`, `markov_head_type`, `enable_confidence_head`) against the "
                "tensors; nothing is ever initialised at random."
            )

    def _check_token_map(self) -> None:
        ids = self.draft_token_ids
        if ids is not None and ids.device.type != "meta" and (ids.min() < 0 or ids.max() >= self.config.vocab_size):
            raise ValueError(
                f"`d2t` leads to token ids from {ids.min()} to {ids.max()}, the vocabulary has "
                f"{self.config.vocab_size} tokens. It holds offsets: the target's id less the draft's."
            )

    def save_pretrained(
        self,
        save_directory: str | os.PathLike,
        state_dict: dict | None = None,
        push_to_hub: bool = False,
        repo_id: str | None = None,
        report: str | os.PathLike | None = None,
        license: str | None = None,
        format: str = NATIVE,
        **kwargs,
    ) -> None:
        """
        As [`~transformers.PreTrainedModel.save_pretrained`]; weights borrowed from the target are left out. A file
        appears in `save_directory` only when it is whole.

        A model card is written as well, by [`hub.write_card`], from what lies in the folder: `training.json`, and
        `eval.json`, which is `report` if that is given. A report on weights that were there before is set aside, as
        `eval.previous.json`.

        Args:
            push_to_hub: upload the folder, too, by [`hub.push`], which gets its own arguments from `kwargs`.
            repo_id: where to (default: the folder's name).
            report: what `hf-dspark eval --json` wrote about this drafter.
            license: one of the Hub's license identifiers, for the card.
            format: `"deepspec"` or `"speculators"` writes config and weights alone, as these have them; of the other
                arguments only `max_shard_size` counts then. Where such a checkpoint has to have tables that the
                drafter borrows, copies of the target's go with it.

        Raises:
            ValueError: `report` is no such report, the drafter cannot be expressed in that format, or it needs a
                target's tables and has not been bound to one.
        """
        if format != NATIVE:
            if push_to_hub or not (state_dict is None and report is None and license is None):
                raise ValueError(f"Cards and uploads are for drafters in the {NATIVE} format, this is to be {format}.")
            if kwargs.get("is_main_process", True):
                self._export(save_directory, format, kwargs.get("max_shard_size", "50GB"))
            return
        results = None if report is None else hub.read_report(report)
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        push_arguments = {name: kwargs.pop(name) for name in _PUSH_ARGUMENTS if name in kwargs}
        if state_dict is None:
            state_dict = self.state_dict()
            for name in ("embed_tokens", "lm_head"):
                if (own := self._own_weight(name)) is not None:
                    state_dict[f"{name}.weight"] = own
        self.config.auto_map = dict(hub.AUTO_MAP)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            self.generation_config.save_pretrained(scratch)
            if self.hardware_profile is not None:
                self.hardware_profile.save(scratch)
            super().save_pretrained(scratch, state_dict=state_dict, **kwargs)
            if not kwargs.get("is_main_process", True):
                return
            shutil.copy(hub.TEMPLATES / hub.STUB, scratch)
            files = {file.name: file for file in Path(scratch).iterdir()}
            for name, file in files.items():
                os.replace(file, folder / name)
        _remove_others(folder, files)
        hub.keep_report(folder, results)
        hub.write_card(folder, license=license)
        if push_to_hub:
            hub.push(folder, repo_id or folder.name, license=license, **push_arguments)

    def _export(self, folder: str | os.PathLike, name: str, max_shard_size: int | str) -> None:
        """Write a checkpoint in the format of that name."""
        config, target = copy.deepcopy(self.config), None
        if self._bound_to is not None and (target := self._bound_to[0]()) is not None:
            config.input_embedding_scale = self._embedding_scale
            config.base_model = config.base_model or hub.repository_of(target)
        if config.copy_ngram_size:
            logger.warning(f"The {name} format has no copy head: the drafter is written without its own.")
            config.copy_ngram_size = 0
        to = writer(name, config)
        written = to.write_config(config, [type(target).__name__] if target is not None else [])
        tensors = {key: tensor for key, tensor in self.state_dict().items() if not key.startswith("copy_head.")}
        for table, rows in (("embed_tokens", config.vocab_size), ("lm_head", config.draft_vocab_size)):
            weight = self._own_weight(table)
            if weight is None and table in to.tables(config):
                if (weight := self._shared.get(table)) is None:
                    raise ValueError(
                        f"A drafter in the {name} format has its own `{table}`, this one borrows the target's: call "
                        "`drafter.bind(target)` first."
                    )
                if len(weight) < rows:
                    raise ValueError(f"The target's `{table}` has {len(weight)} rows, the drafter needs {rows}.")
            if weight is not None:
                tensors[f"{table}.weight"] = weight[:rows].clone()
        tensors = {key: tensor.detach().contiguous() for key, tensor in to.write_tensors(tensors, config).items()}
        written |= {"dtype": str(self.dtype).removeprefix("torch."), "transformers_version": transformers_version}
        with written_together(folder) as scratch:
            save_torch_state_dict(tensors, scratch, max_shard_size=max_shard_size, metadata={"format": "pt"})
            write_text(scratch / "config.json", json.dumps(written, indent=2, sort_keys=True) + "\n")
            names = {file.name for file in scratch.iterdir()}
        _remove_others(Path(folder), names)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        report: str | os.PathLike | None = None,
        license: str | None = None,
        max_shard_size: int | str = "50GB",
        **kwargs,
    ) -> str:
        """
        Upload config, weights, generation config and model card. A folder with records of its own, such as the one
        that training writes, is uploaded by [`hub.push`].

        Args:
            repo_id: `name`, or `organization/name`.
            report: what `hf-dspark eval --json` wrote about this drafter, for the card.
            license: one of the Hub's license identifiers, for the card.
            kwargs: `private`, `token`, `revision`, `create_pr`, `commit_message`, `commit_description` and `tags`, as
                [`hub.push`] takes them.

        Returns:
            The address of the commit.

        Raises:
            ValueError: `report` is no such report.
            OSError: the Hub refused, or could not be reached.
        """
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder, report=report, license=license, max_shard_size=max_shard_size)
            return hub.push(folder, repo_id, license=license, **kwargs)

    # The target

    @property
    def sequential_head(self) -> MarkovHead | CandidateSelector | None:
        """What tells a slot which token comes before it; `None` in a DFlash drafter."""
        return self.markov_head if self.markov_head is not None else self.candidate_selector

    @property
    def draft_token_ids(self) -> torch.Tensor | None:
        """Target ids of the draft vocabulary, (V_d,), or `None` if it is the whole vocabulary."""
        return None if self.d2t is None else torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def target_ids_of(self, tokens: torch.Tensor) -> torch.Tensor:
        """Target ids (...) of draft ids (...)."""
        return tokens if self.d2t is None else tokens + self.d2t.to(tokens.device)[tokens]

    def draft_ids_of(self, tokens: torch.Tensor) -> torch.Tensor:
        """Draft ids (...) of target ids (...), -1 where the draft vocabulary lacks them; for a bound drafter."""
        return tokens if self._draft_ids is None else self._draft_ids[tokens]

    def check_target(self, target: PreTrainedModel) -> None:
        """
        Raises:
            ValueError: this drafter was not made for a model like `target`, and why.
        """
        ours, theirs = self.config, target.config.get_text_config(decoder=True)
        wrong = []
        if theirs.is_encoder_decoder:
            raise ValueError(
                f"{type(target).__name__} is an encoder-decoder; a DSpark drafter works with decoder-only models."
            )
        if ours.target_hidden_size != theirs.hidden_size:
            wrong.append(f"its hidden size is {theirs.hidden_size}, the drafter expects {ours.target_hidden_size}")
        if ours.target_layer_ids[-1] >= theirs.num_hidden_layers:
            wrong.append(f"it has {theirs.num_hidden_layers} layers, the drafter taps layers {ours.target_layer_ids}")
        elif ours.num_target_layers not in (None, theirs.num_hidden_layers):
            wrong.append(f"it has {theirs.num_hidden_layers} layers, the drafter expects {ours.num_target_layers}")
        if target.get_output_embeddings() is None:
            raise ValueError(
                f"{type(target).__name__} has no output head; pass the model with its language model head."
            )
        rows = len(target.get_input_embeddings().weight)
        if ours.vocab_size not in (theirs.vocab_size, rows):
            wrong.append(f"its vocabulary has {theirs.vocab_size} tokens, the drafter's has {ours.vocab_size}")
        elif ours.mask_token_id >= (ours.vocab_size if ours.has_embed_tokens else rows):
            wrong.append(f"the mask token {ours.mask_token_id} lies outside its {rows} embeddings")
        if not (ours.has_embed_tokens and ours.has_lm_head) and ours.hidden_size != theirs.hidden_size:
            wrong.append(
                f"its embeddings of size {theirs.hidden_size} do not fit a drafter of size {ours.hidden_size}"
            )
        if wrong:
            raise ValueError(
                f"The drafter {ours.name_or_path or ''} does not fit the target {theirs.name_or_path or ''} "
                f"({type(target).__name__}): {'; '.join(wrong)}. Load the drafter that was trained for this target."
            )

    def bind(self, target: PreTrainedModel) -> None:
        """
        Take from the target the embeddings and the output head that this drafter lacks, and share those that equal
        the target's. Done again only if one of the two models has changed.

        Raises:
            ValueError: the drafter does not fit the target.
        """
        modules = {"embed_tokens": target.get_input_embeddings(), "lm_head": target.get_output_embeddings()}
        tensors = [module.weight for module in modules.values()] + ([] if self.d2t is None else [self.d2t])
        state = (self.device, self.dtype, *((tensor.data_ptr(), tensor._version) for tensor in tensors))
        if self._bound_to is not None and self._bound_to[0]() is target and self._bound_to[1] == state:
            return
        self.check_target(target)
        if self.config.input_embedding_scale is None:
            self._embedding_scale = float(getattr(modules["embed_tokens"], "scalar_embed_scale", 1.0))
        for name, module in modules.items():
            weight = self._weight_of(module)
            if name == "lm_head" and self.d2t is not None:
                weight = weight[self.draft_token_ids.to(weight.device)]
            weight = weight.to(self.device, self.dtype)
            own = self._own_weight(name)
            if own is None or (own.shape == weight.shape and torch.equal(own.to(weight), weight)):
                setattr(self, name, None)
                self._shared[name] = weight
            elif name in self._shared:  # the checkpoint's own, which equalled another target's
                self._shared[name] = own.to(self.device, self.dtype)
        if (ids := self.draft_token_ids) is not None:
            self._draft_ids = ids.new_full((self.config.vocab_size,), -1)
            self._draft_ids[ids] = torch.arange(len(ids), device=ids.device)
        self._bound_to = (weakref.ref(target), state)
        self._experience.clear()

    @staticmethod
    def _weight_of(module: nn.Embedding | nn.Linear) -> torch.Tensor:
        if module.weight.device.type != "meta":
            return module.weight.detach()
        with align_module_device(module):  # offloaded: it is there only while its hook says so
            return module.weight.detach().clone()

    def _own_weight(self, name: str) -> torch.Tensor | None:
        """The weight that belongs to the checkpoint, even if its values are shared with the target."""
        module = getattr(self, name)
        if module is not None:
            return module.weight
        return self._shared.get(name) if getattr(self.config, f"has_{name}") else None

    def _weight(self, name: str) -> torch.Tensor:
        module = getattr(self, name)
        if module is not None:
            return module.weight
        if name not in self._shared:
            raise ValueError(f"This drafter has no `{name}` of its own; call `drafter.bind(target)` first.")
        return self._shared[name]

    # What it does

    @contextmanager
    def trace(self, alternatives: int = 0) -> Iterator[list]:
        """
        Collect every [`~hf_dspark.Round`] of the `generate()` calls made inside the `with` block; yields the list that
        they go to.

        Args:
            alternatives: give the rounds [`~hf_dspark.generation.trace.Details`], with so many of the most likely
                tokens of the drafter and of the target in every slot. They take time, which is not counted in the
                rounds' seconds; 0 leaves them out.
        """
        outer = self.rounds, self.alternatives
        self.rounds, self.alternatives = [], alternatives
        try:
            yield self.rounds
        finally:
            self.rounds, self.alternatives = outer

    def experience(self, do_sample: bool, rows: int = 1) -> Experience:
        """
        What earlier requests with the same target taught, apart for greedy and sampled ones, and for batches by their
        size, up to the next power of two.
        """
        key = do_sample, (rows - 1).bit_length()
        return self._experience.setdefault(key, Experience(self.config.num_draft_tokens))

    def calibration(self, do_sample: bool) -> Calibration | None:
        """
        How the confidence of a slot follows from what is known of it, when greedy or sampling: as the hardware profile
        says, else from the confidence head as it is; `None` for a drafter that has neither.

        Raises:
            ValueError: the profile's is not for the number of tokens that this drafter drafts.
        """
        profile, slots = self.hardware_profile, self.config.num_draft_tokens
        found = None if profile is None else profile.calibration.get("sample" if do_sample else "greedy")
        if found is None or (found.reads_logit and self.confidence_head is None):
            return None if self.confidence_head is None else Calibration.identity(slots)
        if found.num_draft_tokens != slots:
            profile.check_positions(slots)
        return found

    # The computation

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Embeddings (..., hidden_size) of target token ids (...)."""
        embeddings = F.embedding(input_ids, self._weight("embed_tokens"))
        return embeddings if self._embedding_scale in (None, 1) else embeddings * self._embedding_scale

    def base_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """U, the logits (..., V_d) of hidden states (..., hidden_size), before the sequential head."""
        logits = F.linear(hidden, self._weight("lm_head"))
        if self.config.output_multiplier != 1:
            logits = logits * self.config.output_multiplier
        if (cap := self.config.final_logit_softcapping) is not None:
            logits = cap * (logits / cap).tanh()
        return logits

    def forward(
        self,
        input_ids: torch.Tensor,
        context_hidden_states: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        attention_mask: dict[AttentionPattern, torch.Tensor] | None = None,
        cache: ContextCache | None = None,
    ) -> DSparkOutput:
        """
        Run the backbone over a block (design: paper section 3.1).

        Args:
            input_ids: block tokens, (R, B): the anchor, then mask tokens.
            context_hidden_states: the tapped hidden states, concatenated in the order of `target_layer_ids`, of the
                positions before the anchor that `cache` does not hold yet, (R, T, K * target_hidden_size).
            position_ids: (R, T + B), by default those that follow the cache.
            attention_mask: by [`attention_masks`], each (R, 1, B, cached + T + B), for several blocks at once or
                contexts of different lengths; by default the block stands right behind its context.
            cache: context rows of earlier rounds; the new ones are added to it.
        """
        context = self.hidden_norm(self.fc(context_hidden_states))
        block = self.embed(input_ids)
        if position_ids is None:
            start = 0 if cache is None else cache.end
            position_ids = torch.arange(start, start + context.shape[1] + block.shape[1], device=block.device)[None]
        position_embeddings = self.rotary_emb(block, position_ids)
        if attention_mask is None:
            attention_mask = self._masks_behind(context, block, position_ids, cache)
        if attention_mask and "flash" in (self.config._attn_implementation or ""):
            raise ValueError(
                "Sliding windows and causal blocks need masks, which flash attention does not take: load the drafter "
                'with `attn_implementation="sdpa"`.'
            )
        for layer, pattern in zip(self.layers, self.attention_patterns):
            block = layer(
                block,
                context,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask.get(pattern),
                cache=cache,
            )
        if cache is not None:
            cache.keep(context.shape[1])
        return DSparkOutput(last_hidden_state=self.norm(block), cache=cache)

    def _masks_behind(
        self, context: torch.Tensor, block: torch.Tensor, position_ids: torch.Tensor, cache: ContextCache | None
    ) -> dict[AttentionPattern, torch.Tensor]:
        """Masks of a block that stands right behind its context, for the layers that do not see all of it."""
        held, new = 0 if cache is None else cache.length, context.shape[1]
        patterns = {p for p in self.attention_patterns if not p.sees_all(held + position_ids.shape[1])}
        if not patterns:
            return {}
        rows = position_ids[:, :1] - held + torch.arange(held + new, device=position_ids.device)
        return attention_masks(patterns, position_ids[:, new:], rows, self.config.block_size, block.dtype)

    def block_ids(self, anchor: torch.Tensor, num_draft_tokens: int | None = None) -> torch.Tensor:
        """Block tokens (R, B) for anchors (R, 1), or no more of them than so many drafts take."""
        left_out = 0 if num_draft_tokens is None else self.config.num_draft_tokens - num_draft_tokens
        return F.pad(anchor, (0, self.config.block_size - 1 - left_out), value=self.config.mask_token_id)


def _remove_others(folder: Path, names: Container[str]) -> None:
    """Remove shards of the weights that were in a folder before those of these names."""
    for weights in folder.glob(hub.WEIGHTS):
        if weights.name not in names:
            weights.unlink()


_HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder", "proxies")
_PUSH_ARGUMENTS = ("private", "token", "revision", "create_pr", "commit_message", "commit_description", "tags")
