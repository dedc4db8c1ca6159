"""Programs whose modules change between two calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .containers import Plain
from .state import CHANGES, HOOKS, Change, change, having, setting


def module(build: Callable[[], tuple[nn.Module, Callable[[], Any]]]) -> Callable[[], Any]:
    """A module that a step calls."""

    def whole() -> Change:
        torch.manual_seed(0)
        held, what = build()
        return Change(lambda x: held(x), what)

    CHANGES[build.__name__] = whole
    return build


def placed(held: Any, at: int, value: Any) -> None:
    held[at] = value


@module
def a_dropouts_p():
    m = nn.Dropout(0.0)
    return m, lambda: having("p", 1.0)(m)


@module
def a_layer_norms_eps():
    m = nn.LayerNorm(3)
    return m, lambda: having("eps", 10.0)(m)


@module
def a_batch_norms_momentum():
    m = nn.BatchNorm1d(3)
    return nn.Sequential(m, nn.ReLU()), lambda: having("momentum", 0.9)(m)


@module
def an_elus_alpha():
    m = nn.ELU()
    return m, lambda: having("alpha", 5.0)(m)


@module
def a_leaky_relus_slope():
    m = nn.LeakyReLU()
    return m, lambda: having("negative_slope", 5.0)(m)


@module
def a_gelus_approximation():
    m = nn.GELU()
    return m, lambda: having("approximate", "tanh")(m)


@module
def a_module_put_into_eval():
    m = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    return m, lambda: m.eval()


@module
def a_part_put_into_eval():
    m = nn.Sequential(nn.Linear(3, 3), nn.Dropout(1.0))
    return m, lambda: m[1].eval()


@module
def an_activation_replaced():
    m = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    return m, lambda: placed(m, 1, nn.ReLU())


@module
def a_layer_replaced_by_one_alike():
    m = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    return m, lambda: placed(m, 1, nn.Linear(3, 3))


@module
def a_layer_appended():
    m = nn.Sequential(nn.Linear(3, 3))
    return m, lambda: m.append(nn.Tanh())


@module
def a_layer_removed():
    m = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    return m, lambda: m.pop(1)


@module
def layers_exchanged():
    m = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))

    def swap():
        m[0], m[1] = m[1], m[0]

    return m, swap


@module
def a_forward_replaced():
    m = nn.Linear(3, 3)
    return m, lambda: having("forward", lambda x: x * 5)(m)


@module
def a_forward_replaced_on_a_part():
    m = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    return m, lambda: having("forward", lambda x: x * 5)(m[1])


@module
def a_forward_replaced_on_the_class():
    class Scale(nn.Module):
        def forward(self, x):
            return x * 2

    return Scale(), lambda: having("forward", lambda self, x: x * 5)(Scale)


@module
def a_modules_class_changed():
    class Scale(nn.Module):
        def forward(self, x):
            return x * 2

    class More(Scale):
        def forward(self, x):
            return x * 5

    m = Scale()
    return m, lambda: having("__class__", More)(m)


@module
def a_forward_hook_added():
    m = nn.Linear(3, 3)
    return m, lambda: m.register_forward_hook(lambda m, i, out: out * 5)


@module
def a_forward_hook_removed():
    m = nn.Linear(3, 3)
    hook = m.register_forward_hook(lambda m, i, out: out * 5)
    return m, hook.remove


@module
def a_forward_pre_hook_added_to_a_part():
    m = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    return m, lambda: m[1].register_forward_pre_hook(lambda m, i: (i[0] * 5,))


@module
def a_hook_for_all_modules():
    m = nn.Linear(3, 3)
    return m, lambda: HOOKS.append(
        nn.modules.module.register_module_forward_hook(lambda m, i, out: out * 5)
    )


@module
def what_a_hook_reads():
    m, k = nn.Linear(3, 3), [2]
    m.register_forward_hook(lambda m, i, out: out * k[0])
    return m, lambda: setting(0, 5)(k)


class Holder(nn.Module):
    """A module with whatever attributes."""

    def __init__(self, **held: Any) -> None:
        super().__init__()
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, x):
        return x * self.k


@module
def a_number_in_a_module():
    m = Holder(k=2)
    return m, lambda: having("k", 5)(m)


@module
def a_number_in_a_module_in_a_module():
    m = nn.Sequential(nn.Linear(3, 3), Holder(k=2))
    return m, lambda: having("k", 5)(m[1])


@module
def a_number_that_becomes_a_parameter():
    m = Holder(k=2)

    def change():
        del m.k
        m.k = nn.Parameter(torch.full((), 5.0))

    return m, change


@module
def a_dict_in_a_module():
    class Scaled(Holder):
        def forward(self, x):
            return x * self.cfg["k"]

    m = Scaled(cfg={"k": 2})
    return m, lambda: m.cfg.update(k=5)


@module
def an_object_in_a_module():
    class Scaled(Holder):
        def forward(self, x):
            return x * self.cfg.k

    m = Scaled(cfg=Plain(k=2))
    return m, lambda: having("k", 5)(m.cfg)


@module
def a_module_list_that_grows():
    class All(Holder):
        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    m = All(layers=nn.ModuleList([nn.Linear(3, 3)]))
    return m, lambda: m.layers.append(nn.Linear(3, 3))


@module
def a_plain_list_of_modules_that_grows():
    class All(Holder):
        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    m = All(layers=[nn.Tanh()])
    return m, lambda: m.layers.append(nn.ELU(5.0))


@module
def a_module_dict_entry_replaced():
    class One(Holder):
        def forward(self, x):
            return self.layers["a"](x)

    m = One(layers=nn.ModuleDict({"a": nn.Linear(3, 3)}))
    return m, lambda: setting("a", nn.Tanh())(m.layers)


@module
def a_bias_that_goes():
    m = nn.Linear(3, 3)
    return m, lambda: having("bias", None)(m)


@module
def a_bias_that_comes():
    m = nn.Linear(3, 3, bias=False)
    return m, lambda: having("bias", nn.Parameter(torch.ones(3)))(m)


@module
def a_parameter_replaced():
    m = nn.Linear(3, 3)
    return m, lambda: having("weight", nn.Parameter(torch.ones(3, 3)))(m)


@module
def a_parameter_given_other_data():
    m = nn.Linear(3, 3)
    return m, lambda: having("data", torch.ones(3, 3))(m.weight)


@module
def a_parameter_written_in_place():
    m = nn.Linear(3, 3)
    return m, lambda: m.weight.data.fill_(2)


@module
def a_parameter_frozen():
    m = nn.Linear(3, 3)
    return m, lambda: m.weight.requires_grad_(False)


@module
def a_buffer_replaced():
    m = Holder()
    m.register_buffer("k", torch.full((3,), 2.0))
    return m, lambda: having("k", torch.full((3,), 5.0))(m)


@module
def a_parametrization():
    m = nn.Linear(3, 3)

    class Doubled(nn.Module):
        def forward(self, w):
            return w * 2

    return m, lambda: nn.utils.parametrize.register_parametrization(m, "weight", Doubled())


@module
def the_weights_that_are_tied():
    m = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    return m, lambda: having("weight", m[0].weight)(m[1])


@module
def a_module_of_another_dtype():
    m = nn.Sequential(Holder(k=2.0), nn.Linear(3, 3))
    return m, lambda: m[1].load_state_dict({"weight": torch.ones(3, 3), "bias": torch.ones(3)})


@change
def a_module_without_parameters_in_a_closure_replaced():
    m = nn.Tanh()

    def change():
        nonlocal m
        m = nn.ReLU()

    return Change(lambda x: m(x), change)


@change
def a_model_in_a_closure_replaced():
    m = nn.Linear(3, 3)

    def change():
        nonlocal m
        m = nn.Linear(3, 3)
        nn.init.ones_(m.weight)

    def build(x):
        return m(x)

    nn.init.zeros_(m.weight)
    nn.init.zeros_(m.bias)
    m.bias.requires_grad_(False)
    return Change(
        lambda x: build(x) * 1 if m is not None else x, lambda: (change(), nn.init.ones_(m.bias))
    )


@change
def a_module_in_a_dict_replaced():
    held = {"f": nn.Tanh()}
    return Change(lambda x: held["f"](x), lambda: held.update(f=nn.ReLU()))


@change
def a_list_of_tensors_that_grows():
    held = [torch.ones(3)]
    return Change(lambda x: x * sum(held), lambda: held.append(torch.ones(3)))


@change
def a_dict_of_tensors_that_grows():
    held = {"a": torch.ones(3)}
    return Change(lambda x: x * sum(held.values()), lambda: held.update(b=torch.ones(3)))


@change
def a_tensor_in_a_dict_replaced():
    held = {"a": torch.ones(3)}
    return Change(lambda x: x * held["a"], lambda: held.update(a=torch.full((3,), 5.0)))


@change
def a_tensor_in_a_closure_replaced():
    k = torch.ones(3)

    def change():
        nonlocal k
        k = torch.full((3,), 5.0)

    return Change(lambda x: x * k, change)


@change
def a_compiled_module():
    m = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.0))
    torch.manual_seed(0)
    m[0].reset_parameters()
    return Change(m, lambda: having("p", 1.0)(m[1]))


@change
def a_compiled_modules_hook():
    m = nn.Sequential(nn.Tanh(), nn.Tanh())
    return Change(m, lambda: m[1].register_forward_hook(lambda m, i, out: out * 5))


@change
def a_compiled_modules_layer_replaced():
    m = nn.Sequential(nn.Tanh(), nn.Tanh())
    return Change(m, lambda: placed(m, 1, nn.ReLU()))
