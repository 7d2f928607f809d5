# Llama 3.1 405B (arXiv 2407.21783, table 3): 16 M tokens per batch.
torchrun --nproc-per-node 8 --nnodes 2048 pretrain_gpt.py \
  --num-layers 126 --hidden-size 16384 --num-attention-heads 128 --group-query-attention --num-query-groups 8 \
  --ffn-hidden-size 53248 --swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights \
  --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0 \
  --seq-length 8192 --max-position-embeddings 8192 --vocab-size 128256 \
  --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --sequence-parallel \
  --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split \
  --micro-batch-size 1 --global-batch-size ${GLOBAL_BATCH:-2048} --bf16 --use-distributed-optimizer \
  --overlap-grad-reduce --overlap-param-gather --use-flash-attn --transformer-impl transformer_engine
