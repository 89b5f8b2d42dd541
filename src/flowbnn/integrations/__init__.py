"""Integrations of other libraries, one module each. None of them is imported by ``import flowbnn``.

* :mod:`flowbnn.integrations.huggingface`: callbacks for the ``Trainer`` of transformers.
* :mod:`flowbnn.integrations.lightning`: callbacks for the ``Trainer`` of Lightning.
* :mod:`flowbnn.integrations.peft`: noise on LoRA adapters, and files of adapters with noise.

Graph networks of torch_geometric need no module, because its layers and loaders are known.
"""
