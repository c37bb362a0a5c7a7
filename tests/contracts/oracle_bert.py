"""BERT's encoder as transformers has it; its tokens see one another, and its result is the last layer's output."""

from torch import nn
from transformers import BertConfig, BertModel


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.bert = BertModel(BertConfig(**config), add_pooling_layer=False)

    def forward(self, token_ids_BT):
        return self.bert(token_ids_BT).last_hidden_state
