"""XLM-RoBERTa's encoder as transformers has it. Positions are given: tokens of padding's id are none here."""

import torch
from torch import nn
from transformers import XLMRobertaConfig, XLMRobertaModel


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.roberta = XLMRobertaModel(XLMRobertaConfig(**config), add_pooling_layer=False)

    def forward(self, token_ids_BT):
        first = self.roberta.config.pad_token_id + 1
        positions_T = torch.arange(first, first + token_ids_BT.shape[1])
        return self.roberta(token_ids_BT, position_ids=positions_T[None]).last_hidden_state
