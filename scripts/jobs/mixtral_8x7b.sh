# Mixtral 8x7B on 64 H100.
torchrun --nproc-per-node 8 --nnodes 8 pretrain_gpt.py \
  --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --group-query-attention --num-query-groups 8 \
  --ffn-hidden-size 14336 --swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights \
  --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0 \
  --num-experts 8 --moe-router-topk 2 --moe-grouped-gemm --moe-token-dispatcher-type alltoall \
  --seq-length 4096 --max-position-embeddings 4096 --vocab-size 32000 \
  --tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 --expert-model-parallel-size 8 \
  --micro-batch-size 1 --global-batch-size 256 --bf16 --use-distributed-optimizer \
  --overlap-grad-reduce --overlap-param-gather --use-flash-attn --transformer-impl transformer_engine
