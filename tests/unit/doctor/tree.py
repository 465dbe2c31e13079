"""vLLM source trees with models in them, and the folders of models that they would serve."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.unit.vllm_tree import write_vllm

from vllm_compat import detect
from vllm_compat.doctor.model import ModelVerdict, judge_model
from vllm_compat.doctor.statement import Plain, Statement

MODELS = "model_executor/models"

REGISTRY = """
_TEXT_GENERATION_MODELS = {
    "LlamaForCausalLM": ("llama", "LlamaForCausalLM"),
    "Qwen3ForCausalLM": ("qwen3", "Qwen3ForCausalLM"),
    "DeepseekV3ForCausalLM": ("deepseek_v2", "DeepseekV3ForCausalLM"),
    "PlamoForCausalLM": ("plamo", "PlamoForCausalLM"),
    "HunYuanForCausalLM": ("hunyuan", "HunYuanForCausalLM"),
    "NextForCausalLM": ("vllm.models.next", "NextForCausalLM"),
    "StreamsForCausalLM": ("streams", "StreamsForCausalLM"),
    "LostForCausalLM": ("lost", "LostForCausalLM"),
    "BareForCausalLM": ("bare", "BareForCausalLM"),
}
_EMBEDDING_MODELS = {
    "BertModel": ("bert", "BertEmbeddingModel"),
    **{k: (mod, arch) for k, (mod, arch) in _TEXT_GENERATION_MODELS.items() if arch == "LlamaForCausalLM"},
}
_MULTIMODAL_MODELS = {
    "KimiForConditionalGeneration": ("kimi", "KimiForConditionalGeneration"),
    "LlavaForConditionalGeneration": ("kimi", "LlavaForConditionalGeneration"),
    "TwoListsForConditionalGeneration": ("kimi", "TwoListsForConditionalGeneration"),
}
_TRANSFORMERS_SUPPORTED_MODELS = {
    "NeoXForCausalLM": ("transformers", "TransformersForCausalLM"),
}
_PREVIOUSLY_SUPPORTED_MODELS = {
    "BambaForCausalLM": "0.23.0",
}
"""

LLAMA = """
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from .interfaces import SupportsEagle3
from .utils import make_layers

class LlamaDecoderLayer(nn.Module):
    def forward(self, positions, hidden_states, residual):
        def inner():
            return 1, 2, 3
        return hidden_states, residual

class LlamaModel(nn.Module):
    def __init__(self, *, vllm_config, layer_type: type[nn.Module] = LlamaDecoderLayer):
        self.embed_tokens = VocabParallelEmbedding(1, 2)
        self.start_layer, self.end_layer, self.layers = make_layers(
            6, lambda prefix: layer_type(vllm_config, prefix=prefix)
        )

    def forward(self, input_ids):
        aux_hidden_states = self._maybe_add_hidden_state([], 0, hidden_states, residual)
        for idx, layer in enumerate(self.layers):
            self._maybe_add_hidden_state(aux_hidden_states, idx + 1, hidden_states, residual)

class LlamaForCausalLM(nn.Module, SupportsEagle3):
    def __init__(self, *, vllm_config):
        self.model = self._init_model(vllm_config)

    def _init_model(self, vllm_config):
        return LlamaModel(vllm_config=vllm_config)

    def forward(self, input_ids): ...
"""

QWEN3 = """
from .llama import LlamaForCausalLM, LlamaModel

class Qwen3DecoderLayer(nn.Module):
    def forward(self, hidden_states):
        return hidden_states

class Qwen3Model(LlamaModel):
    decoder_layer_type: type[nn.Module] = Qwen3DecoderLayer

    def __init__(self, *, vllm_config):
        super().__init__(vllm_config=vllm_config, layer_type=self.decoder_layer_type)

class Qwen3ForCausalLM(nn.Module):
    def __init__(self, *, vllm_config):
        self.model = Qwen3Model(vllm_config=vllm_config)
"""

DEEPSEEK = """
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from .interfaces import SupportsEagle3
from .utils import make_layers

class DeepseekV2DecoderLayer(nn.Module):
    def forward(self, positions, hidden_states, residual):
        if hidden_states is None:
            return None, None
        return hidden_states, residual

class DeepseekV2Model(nn.Module):
    def __init__(self, *, vllm_config):
        self.start_layer, self.end_layer, self.layers = make_layers(
            61, lambda prefix: DeepseekV2DecoderLayer(vllm_config, prefix)
        )
        if first_rank:
            self.embed_tokens = VocabParallelEmbedding(1, 2)

    def forward(self, input_ids):
        for idx, layer in enumerate(self.layers):
            if idx in self.aux_hidden_state_layers:
                aux_hidden_states.append(hidden_states + residual)
            hidden_states, residual = layer(positions, hidden_states, residual)

class DeepseekV2ForCausalLM(nn.Module, SupportsEagle3):
    model_cls = DeepseekV2Model

class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM): ...
"""
DEEPSEEK_WITH_LAST = DEEPSEEK.replace(
    "\nclass DeepseekV2ForCausalLM(",
    "        if self.end_layer in self.aux_hidden_state_layers:\n"
    "            aux_hidden_states.append(hidden_states + residual)\n\nclass DeepseekV2ForCausalLM(",
)

OTHERS = {
    f"{MODELS}/plamo": """
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

class PlamoDecoder(nn.Module):
    def __init__(self):
        self.layers = nn.ModuleList([PlamoLayer() for _ in range(4)])

class PlamoModel(nn.Module):
    def __init__(self):
        self.embed_tokens = VocabParallelEmbedding(1, 2)
        self.layers = PlamoDecoder()

class PlamoForCausalLM(nn.Module):
    model_cls = PlamoModel
""",
    f"{MODELS}/hunyuan": """
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

class HunYuanLayer(nn.Module):
    def forward(self, hidden_states):
        return hidden_states, residual, kv_states

class HunYuanModel(nn.Module):
    def __init__(self):
        self.embed_tokens = VocabParallelEmbedding(1, 2)
        self.layers = nn.ModuleList([HunYuanLayer() for _ in range(4)])

class HunYuanForCausalLM(nn.Module):
    model_cls = HunYuanModel
""",
    f"{MODELS}/streams": """
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

class StreamsModel(nn.Module):
    def __init__(self):
        self.embed_tokens = VocabParallelEmbedding(1, 2)
        self.layers = nn.ModuleList([1])

    def forward(self, input_ids):
        hidden_states = hidden_states.unsqueeze(-2).repeat(1, self.hc_mult, 1)

class StreamsForCausalLM(nn.Module):
    model_cls = StreamsModel
""",
    f"{MODELS}/kimi": """
class VisionEncoder(nn.Module):
    def __init__(self):
        self.blocks = nn.ModuleList([1])

class TextDecoder(nn.Module):
    def __init__(self):
        self.layers = nn.ModuleList([1])

class KimiForConditionalGeneration(nn.Module):
    def __init__(self, *, vllm_config):
        self.vision_tower = VisionEncoder()
        self.language_model = init_vllm_registered_model(
            vllm_config=vllm_config, architectures=["DeepseekV3ForCausalLM"]
        )

class LlavaForConditionalGeneration(nn.Module):
    def __init__(self, *, vllm_config):
        self.vision_tower = VisionEncoder()
        self.language_model = init_vllm_registered_model(vllm_config=vllm_config)

class TwoListsForConditionalGeneration(nn.Module):
    def __init__(self):
        self.vision_tower, self.language_model = VisionEncoder(), TextDecoder()
""",
    f"{MODELS}/bare": """
class BareForCausalLM(nn.Module):
    def __init__(self):
        self.vision_tower = AutoModel.from_config(config=self.config.vision_config)
""",
    f"{MODELS}/transformers/__init__": """
from .base import Base
from .causal import CausalMixin

class TransformersForCausalLM(CausalMixin, Base): ...
""",
    f"{MODELS}/transformers/causal": """
from vllm.model_executor.models.interfaces_base import VllmModel

class CausalMixin(VllmModel): ...
""",
    f"{MODELS}/transformers/base": """
from vllm.model_executor.models.interfaces_base import VllmModel

class Base(nn.Module, VllmModel):
    def __init__(self, *, vllm_config):
        self.model: PreTrainedModel = AutoModel.from_config(config=vllm_config)

    def forward(self, input_ids): ...
""",
    f"{MODELS}/interfaces_base": "class VllmModel(Protocol):\n    def forward(self, input_ids): ...\n",
    "models/next/__init__": """
if current_platform.is_rocm():
    from .amd import NextForCausalLM
elif current_platform.is_cpu():
    from .cpu import NextForCausalLM
else:
    from .nvidia import NextForCausalLM
""",
    **{f"models/next/{name}": "class NextForCausalLM(nn.Module): ...\n" for name in ("amd", "cpu", "nvidia")},
}

NATIVE = {
    "v1/spec_decode/extract_hidden_states": "class ExtractHiddenStatesProposer: ...\n",
    "distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector": """
class ExampleHiddenStatesConnector:
    def save(self):
        if get_tensor_model_parallel_rank() == 0:
            ready = torch.cuda.Event()
""",
    "config/speculative": "",
}

LLAMA_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
}
TEXT_CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}
KIMI_CONFIG: dict[str, Any] = {
    "architectures": ["KimiForConditionalGeneration"],
    "model_type": "kimi",
    "text_config": TEXT_CONFIG,
    "vision_config": {"num_hidden_layers": 61},
}


def write_tree(site: Path, *, version: str = "0.99.0", add: Mapping[str, str] | None = None, **options: Any) -> Path:
    """``site/vllm`` with the models above; ``add`` adds or replaces files."""
    models = {
        f"{MODELS}/registry": REGISTRY,
        f"{MODELS}/llama": LLAMA,
        f"{MODELS}/qwen3": QWEN3,
        f"{MODELS}/deepseek_v2": DEEPSEEK,
        **OTHERS,
    }
    return write_vllm(site, version=version, add={**models, **(add or {})}, **options)


def write_model(folder: Path, config: Mapping[str, Any]) -> str:
    """A model's folder with that ``config.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)


def judge(tmp_path: Path, config: Mapping[str, Any], **options: Any) -> ModelVerdict:
    """The verdict on a model with that configuration in a vLLM made by ``write_tree``."""
    return judge_model(detect(write_tree(tmp_path, **options)), write_model(tmp_path / "model", config))


def said(statements: tuple[Statement, ...]) -> dict[str, Plain]:
    """Name -> value."""
    return {s.name: s.value for s in statements}


def find(statements: tuple[Statement, ...], name: str) -> Statement:
    """The statement of that name, of which there is one."""
    (found,) = (s for s in statements if s.name == name)
    return found
