"""Biases follow the device of a call."""

import pickle

import torch

import polyhead as ph


def test_a_bias_of_the_host_is_sent_to_the_device_of_a_call_once():
    slopes = torch.rand(4)
    bias, there = ph.ALiBi(slopes), torch.device("meta")
    assert bias.on(torch.device("cpu")) is bias
    sent = bias.on(there)
    assert sent.slopes.is_meta
    assert bias.on(there) is sent
    slopes.mul_(2.0)
    assert bias.on(there) is not sent
    assert type(pickle.loads(pickle.dumps(bias))) is ph.ALiBi
    learned = ph.ALiBi(slopes.requires_grad_())
    assert learned.on(there).slopes.requires_grad
    assert learned.on(there) is not learned.on(there)
    q = torch.empty(1, 4, 3, 8, device="meta")
    assert ph.attention(q, q, q, bias=learned).is_meta
