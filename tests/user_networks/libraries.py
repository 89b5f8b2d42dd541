"""Networks of transformers, peft, timm (rebuilt, because it is not installed), Lightning and torch_geometric."""

import warnings
from typing import Any

import torch
from tests.user_networks.cases import CLASSES, ROWS, Case, add, halves, normal, words
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import flowbnn as fb

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of these libraries about torch and each other
    import lightning
    import transformers as hf
    from peft import LoraConfig, get_peft_model
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader as GraphLoader
    from torch_geometric.nn import GATConv, GCNConv, SAGEConv, global_mean_pool

__all__ = ["Case"]

SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
TEXT: dict[str, Any] = {**SIZES, "vocab_size": 12, "num_labels": 3, "pad_token_id": 0}


def bert(kind: str = "BertForSequenceClassification", **options: Any) -> Any:
    settings = {"max_position_embeddings": 8, "hidden_dropout_prob": 0.0} | options
    return getattr(hf, kind)(hf.BertConfig(**TEXT, **settings))


def sentences() -> dict[str, Tensor]:
    ids = words(ROWS, 5).clamp_min(1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class Examples(Dataset):
    """Examples as dictionaries with labels."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        columns = {**sentences(), "labels": CLASSES}
        return {name: values[index] for name, values in columns.items()}


def lora(targets: list[str]) -> Any:
    network = get_peft_model(bert(), LoraConfig(task_type="SEQ_CLS", r=2, target_modules=targets))
    for name, value in network.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(value, std=0.3)
    return network


class EncoderClassifier(nn.Module):
    """Classifier on the encoder of T5."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
        self.encoder = hf.T5EncoderModel(hf.T5Config(vocab_size=12, **sizes))
        self.head = nn.Linear(8, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return self.head(hidden.mean(1))


def checkpointed() -> Any:
    network = bert()
    network.gradient_checkpointing_enable()
    return network


def swin() -> Any:
    sizes = {"image_size": 16, "patch_size": 2, "window_size": 2, "embed_dim": 4, "depths": [1, 1]}
    return hf.SwinForImageClassification(
        hf.SwinConfig(num_channels=1, num_heads=[1, 2], num_labels=3, **sizes)
    )


def segformer() -> Any:
    config = hf.SegformerConfig(
        num_channels=1, num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[4, 8], patch_sizes=[3, 3],
        strides=[2, 2], num_attention_heads=[1, 2], mlp_ratios=[1, 1], decoder_hidden_size=8, num_labels=3,
    )  # fmt: skip
    return hf.SegformerForSemanticSegmentation(config)


def mixtral() -> Any:
    config = hf.MixtralConfig(
        **TEXT, num_key_value_heads=1, num_local_experts=2, num_experts_per_tok=1, max_position_embeddings=8
    )
    config._experts_implementation = "eager"  # the grouped kernel has no double precision
    return hf.MixtralForSequenceClassification(config)


# -------------------- 50 to 63 of the list

add("bert pair", bert, lambda: halves(sentences()))
add("bert hf dict batches", bert, lambda: DataLoader(Examples(), 12))
add(
    "distilbert",
    lambda: hf.DistilBertForSequenceClassification(
        hf.DistilBertConfig(
            vocab_size=12, max_position_embeddings=8, dim=8, n_layers=1, n_heads=2, hidden_dim=8, num_labels=3
        )
    ),
    lambda: halves(sentences()),
)
add(
    "gpt2 cls",
    lambda: hf.GPT2ForSequenceClassification(
        hf.GPT2Config(
            vocab_size=12, n_positions=8, n_embd=8, n_layer=1, n_head=2, num_labels=3, pad_token_id=0
        )
    ),
    lambda: halves(sentences()),
)
add(
    "llama cls",
    lambda: hf.LlamaForSequenceClassification(
        hf.LlamaConfig(**TEXT, num_key_value_heads=1, max_position_embeddings=8)
    ),
    lambda: halves(sentences()),
)
add("t5 encoder cls", EncoderClassifier, lambda: halves(sentences()))
add(
    "bert token cls",
    lambda: bert("BertForTokenClassification"),
    lambda: halves(sentences(), words(ROWS, 5, vocabulary=3)),
)
add(
    "bert base model output",
    lambda: bert("BertModel"),
    lambda: halves(sentences(), CLASSES),
    output="pooler_output",
)
add(
    "hf vit",
    lambda: hf.ViTForImageClassification(
        hf.ViTConfig(image_size=8, patch_size=4, num_channels=1, num_labels=3, **SIZES)
    ),
    lambda: halves(normal(ROWS, 1, 8, 8)),
)
add(
    "hf resnet",
    lambda: hf.ResNetForImageClassification(
        hf.ResNetConfig(
            num_channels=1,
            embedding_size=4,
            hidden_sizes=[4, 8],
            depths=[1, 1],
            layer_type="basic",
            num_labels=3,
        )
    ),
    lambda: halves(normal(ROWS, 1, 8, 8)),
)
add("lora bert", lambda: lora(["query", "value"]), lambda: halves(sentences()))
add(
    "lora bert rules lora only",
    lambda: lora(["query", "value"]),
    lambda: halves(sentences()),
    rules={"*lora_A*": fb.noise.NormalAffine(base_scale=0.1)},
)
add("bert grad ckpt", checkpointed, lambda: halves(sentences()))
add("bert eager attn", lambda: bert(attn_implementation="eager"), lambda: halves(sentences()))

# -------------------- 64 to 67: the unusual layers of timm


class NormAct(nn.BatchNorm2d):
    """Batch norm with an activation inside, as timm's BatchNormAct2d."""

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(super().forward(x), inplace=True)


class CastLinear(nn.Linear):
    """Linear layer with a forward of its own, as timm's Linear."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight, self.bias)


class ChannelNorm(nn.LayerNorm):
    """Layer norm of images, as timm's LayerNorm2d."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class SqueezeExcite(nn.Module):
    """Attention of channels by 1x1 convolutions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.reduce, self.expand = nn.Conv2d(width, 2, 1), nn.Conv2d(2, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * F.hardsigmoid(self.expand(F.relu(self.reduce(x.mean((2, 3), keepdim=True)), inplace=True)))


class SamePadding(nn.Conv2d):
    """Convolution that pads by its own rule, as timm's Conv2dSame."""

    def forward(self, input: Tensor) -> Tensor:
        return F.conv2d(F.pad(input, (0, 1, 0, 1)), self.weight, self.bias, self.stride, groups=self.groups)


def pool(width: int, head: type[nn.Linear] = nn.Linear) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), head(width, 3)]


def timm_resnet() -> nn.Module:
    stem = [
        nn.Conv2d(1, 3, 3, padding=1, bias=False),
        NormAct(3),
        nn.Conv2d(3, 4, 3, 2, 1, bias=False),
        NormAct(4),
    ]
    down = [nn.AvgPool2d(2, ceil_mode=True, count_include_pad=False), nn.Conv2d(4, 6, 1, bias=False)]
    return nn.Sequential(*stem, *down, nn.BatchNorm2d(6), nn.ReLU(inplace=True), *pool(6))


def timm_mobilenet() -> nn.Module:
    depthwise = [nn.Conv2d(4, 4, 3, padding=1, groups=4, bias=False), NormAct(4), SqueezeExcite(4)]
    return nn.Sequential(nn.Conv2d(1, 4, 1), *depthwise, nn.Hardswish(), *pool(4, CastLinear))


def timm_efficientnet() -> nn.Module:
    depthwise = [SamePadding(4, 4, 2, 2, groups=4, bias=False), NormAct(4), SqueezeExcite(4)]
    return nn.Sequential(SamePadding(1, 4, 2), NormAct(4), *depthwise, *pool(4))


def timm_convnext() -> nn.Module:
    stem = [nn.Conv2d(1, 4, 2, 2), ChannelNorm(4), nn.Conv2d(4, 4, 3, padding=1, groups=4), ChannelNorm(4)]
    return nn.Sequential(*stem, nn.Conv2d(4, 8, 1), nn.GELU(), nn.Conv2d(8, 4, 1), *pool(4))


for name, make in {
    "timm resnet10t": timm_resnet,
    "timm mobilenetv3 small 050": timm_mobilenet,
    "timm test efficientnet": timm_efficientnet,
    "timm test convnext": timm_convnext,
}.items():
    add(name, make, lambda: halves(normal(ROWS, 1, 8, 8)))

# -------------------- 68 to 71, and 45

add("hf swin", swin, lambda: halves(normal(ROWS, 1, 16, 16)))
add(
    "hf segformer pixels", segformer, lambda: halves(normal(ROWS, 1, 16, 16), words(ROWS, 8, 8, vocabulary=3))
)
add("hf mixtral cls", mixtral, lambda: halves(sentences()))


class GraphNetwork(nn.Module):
    """Graph network with a class for every graph."""

    def __init__(self, layer: Any = GCNConv) -> None:
        super().__init__()
        self.conv, self.head = layer(4, 6), nn.Linear(6, 3)

    def forward(self, data: Any) -> Tensor:
        return self.head(global_mean_pool(self.conv(data.x, data.edge_index).relu(), data.batch))


class NodeClassifier(nn.Module):
    """Graph network with a class for every node."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = GATConv(4, 3, heads=2), SAGEConv(6, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.last(self.first(x, edge_index).relu(), edge_index)


def graphs() -> list[Data]:
    edges = torch.tensor([[0, 1, 2], [1, 2, 0]])
    return [
        Data(x=normal(3, 4) + index / 9, edge_index=edges, y=CLASSES[index : index + 1])
        for index in range(ROWS)
    ]


def one_graph() -> Data:
    index = torch.arange(ROWS)
    return Data(x=normal(ROWS, 4), edge_index=torch.stack([index, (index + 1) % ROWS]), y=CLASSES)


add(
    "pyg gcn graph loader",
    GraphNetwork,
    lambda: GraphLoader(graphs(), batch_size=12),
    refusals={"calibrate": "rows"},
)


class Module(lightning.LightningModule):
    """LightningModule with its loss inside."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def training_step(self, batch: Any, index: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])


add("lightning module", Module, lambda: halves(normal(ROWS, 4)))

# -------------------- beyond the list

add("pyg sage graphs", lambda: GraphNetwork(SAGEConv), graphs, refusals={"calibrate": "rows"})
add("pyg gat nodes", NodeClassifier, one_graph, refusals={"calibrate": "rows"})
add(
    "electra",
    lambda: hf.ElectraForSequenceClassification(
        hf.ElectraConfig(**TEXT, max_position_embeddings=8, embedding_size=8)
    ),
    lambda: halves(sentences()),
)
add(
    "hf convnext",
    lambda: hf.ConvNextForImageClassification(
        hf.ConvNextConfig(
            num_channels=1, num_stages=2, hidden_sizes=[4, 8], depths=[1, 1], patch_size=2, num_labels=3
        )
    ),
    lambda: halves(normal(ROWS, 1, 8, 8)),
)
