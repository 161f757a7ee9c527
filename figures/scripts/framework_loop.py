"""A short training with the Trainer of Transformers, or of Lightning.

Each completed step is a line ``step TIME`` in ``OUT/steps-RANK``.
"""

from __future__ import annotations

import argparse
import os
import time

p = argparse.ArgumentParser()
p.add_argument("--framework", choices=["transformers", "lightning"], required=True)
p.add_argument("--out", required=True)
p.add_argument("--steps", type=int, default=100_000)
args = p.parse_args()


def completed(step: int) -> None:
    with open(os.path.join(args.out, f"steps-{os.environ['RANK']}"), "a") as log:
        log.write(f"{step} {time.time()} {os.getpid()}\n")
    time.sleep(0.02)


if args.framework == "transformers":
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, arguments, state, control, **_):  # type: ignore[no-untyped-def]
            completed(state.global_step)

    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=64, n_positions=32))
    data = [{"input_ids": torch.arange(32) % 64, "labels": torch.arange(32) % 64} for _ in range(64)]
    arguments = TrainingArguments(
        output_dir=args.out,
        max_steps=args.steps,
        per_device_train_batch_size=2,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    Trainer(model, arguments, train_dataset=data, callbacks=[Watch()]).train()
else:
    import lightning as L
    import torch
    from lightning.pytorch.strategies import DDPStrategy

    class Model(L.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(32, 1)

        def training_step(self, batch, _):  # type: ignore[no-untyped-def]
            return self.layer(batch).pow(2).mean()

        def configure_optimizers(self):  # type: ignore[no-untyped-def]
            return torch.optim.AdamW(self.parameters())

        def on_train_batch_end(self, *_):  # type: ignore[no-untyped-def]
            completed(self.trainer.global_step)

    loader = torch.utils.data.DataLoader(torch.ones(4096, 32), batch_size=2)
    trainer = L.Trainer(
        accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=DDPStrategy(process_group_backend="gloo"), max_steps=args.steps,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Model(), loader)
