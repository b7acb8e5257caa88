"""Analysis of heads: recording, metrics, ablation, roles, attribution, similarity. The model is not changed."""

from typing import TYPE_CHECKING

from headwise.lazy_import import lazy_names

if TYPE_CHECKING:
    from headwise.analysis.ablation.ablate import ablated, patched
    from headwise.analysis.ablation.importance import importance
    from headwise.analysis.ablation.sensitivity import sensitivity
    from headwise.analysis.attribution.score_attribution import explain
    from headwise.analysis.metrics.metric import AttentionToPosition, AttentionToTokens, Metric, MetricSpec
    from headwise.analysis.recording.attention_maps import attention_maps
    from headwise.analysis.recording.recording import record
    from headwise.analysis.recording.tokenized_corpus import TokenizedCorpus
    from headwise.analysis.roles.head_history import HeadHistory
    from headwise.analysis.roles.profile import profile
    from headwise.analysis.roles.profile_result import Profile
    from headwise.analysis.roles.roles import Role
    from headwise.analysis.roles.sharded_profile import profile_shards
    from headwise.analysis.similarity.compare_heads import compare_heads
    from headwise.analysis.similarity.match_heads import match_heads

__all__ = [
    "AttentionToPosition",
    "AttentionToTokens",
    "HeadHistory",
    "Metric",
    "MetricSpec",
    "Profile",
    "Role",
    "TokenizedCorpus",
    "ablated",
    "attention_maps",
    "compare_heads",
    "explain",
    "importance",
    "match_heads",
    "patched",
    "profile",
    "profile_shards",
    "record",
    "sensitivity",
]

__getattr__ = lazy_names(
    __name__,
    {
        "ablation.ablate": ["ablated", "patched"],
        "ablation.importance": ["importance"],
        "ablation.sensitivity": ["sensitivity"],
        "attribution.score_attribution": ["explain"],
        "metrics.metric": ["AttentionToPosition", "AttentionToTokens", "Metric", "MetricSpec"],
        "recording.attention_maps": ["attention_maps"],
        "recording.recording": ["record"],
        "recording.tokenized_corpus": ["TokenizedCorpus"],
        "roles.head_history": ["HeadHistory"],
        "roles.profile": ["profile"],
        "roles.profile_result": ["Profile"],
        "roles.roles": ["Role"],
        "roles.sharded_profile": ["profile_shards"],
        "similarity.compare_heads": ["compare_heads"],
        "similarity.match_heads": ["match_heads"],
    },
)
