# Llama 3 70B on 64 H100.
torchrun --nproc-per-node 8 --nnodes 8 pretrain_gpt.py \
  --num-layers 80 --hidden-size 8192 --num-attention-heads 64 --group-query-attention --num-query-groups 8 \
  --ffn-hidden-size 28672 --swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights \
  --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0 \
  --seq-length 8192 --max-position-embeddings 8192 --vocab-size 128256 \
  --tensor-model-parallel-size 4 --pipeline-model-parallel-size 8 --sequence-parallel \
  --micro-batch-size 1 --global-batch-size 128 --bf16 --use-distributed-optimizer \
  --overlap-grad-reduce --overlap-param-gather --use-flash-attn --transformer-impl transformer_engine
