"""The rows of ``idioms/``."""

from tests.strangers.rows import Verdict, idiom

IDIOM_ROWS = (
    idiom("word_language_model", steps=(0.8, 0.95)),
    idiom("imagenet_copyfile", steps=(0.7, 0.9)),
    idiom("timm_write_then_rename"),
    idiom("rotate_checkpoints"),
    idiom("own_resume"),
    idiom("own_resume_ddp", world=2),
    idiom("dqn_replay_buffer"),
    idiom("grad_norm_logging"),
    idiom("gan"),
    idiom(
        "hand_written_sgd",
        at_line="^149 ",
        verdict=Verdict.UNPROTECTED,
        says=r"this script trains without a torch\.optim\.Optimizer",
    ),
    idiom("log_files"),
    idiom("optimizer_each_batch"),
)
