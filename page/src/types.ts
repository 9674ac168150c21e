// Made by `python -m page.make_types` from the records of contracts/: do not edit.

export interface AdditionDataset {
  type: ("addition");
  difficulty_pools?: DifficultyPools;
}

export interface AlgorithmSpec {
  loss: (("bnpo" | "cispo" | "dapo" | "dr_grpo" | "grpo" | "gspo" | "sft") | PluginLoss);
  advantage: ("dr_grpo" | "gae" | "gdpo" | "grpo" | "lite_ppo" | "none" | "reinforce++_baseline" | "rloo");
  gae_lambda?: number;
  discount?: number;
  value_coefficient?: number;
  whiten_advantages?: boolean;
  value_clip?: number;
  reward_clip?: number;
  credit: ("trajectory" | "turn");
  advantage_epsilon: number;
  updates_per_iteration: number;
  mini_batches?: number;
  old_policy: ("generator" | "trainer");
  clip_low: (number | null);
  clip_high: (number | null);
  clip_max?: number;
  kl_coefficient: number;
  ref_model_sync_iterations?: number;
  ref_model_mixup_alpha?: number;
  kl_estimator: ("k1" | "k2" | "k3");
  use_bias_correction_kl?: boolean;
  kl_placement: ("loss" | "reward");
  entropy_coefficient: number;
  distillation_coefficient: number;
  distillation_beta?: number;
  correction: (("decoupled_ppo" | "icepop" | "none" | "tis") | null);
  correction_level: ("geometric" | "sequence" | "token");
  correction_low: (number | null);
  correction_high: (number | null);
  off_policy_mask_threshold?: number;
  routing_replay?: boolean;
  on_truncated?: ("mask" | "penalise" | "score");
  truncated_reward?: number;
  shuffle_rewards: boolean;
}

export interface AuditChain {
  records: (AuditRecord & { digest?: string; })[];
}

export interface AuditRecord {
  kind: string;
  iteration: number;
  policy_version: number;
  weights_digest: string;
  next_weights_digest: string;
  trainer_epoch: number;
  batches: Record<string, string>;
  abandoned: Record<string, string>;
  loss: number;
  grad_norm: number;
  reward_mean: number;
  on_unscorable?: Record<string, number>;
  unscorable?: Record<string, Record<string, number>>;
  sampled?: SampledBy[];
  columns?: Record<string, string>;
  environment?: string;
  rewards?: Record<string, string>;
  files?: string;
  in_sums?: number[];
  forked?: ForkedFrom;
  drawn?: DrawnPrompts[];
  probe?: ProbedVersion;
  first_probe?: ProbedVersion;
  held_out?: number;
  stopped?: string;
  previous: string;
}

export interface AuditVerdict {
  job_id: string;
  verified: boolean;
  records: number;
  iterations: number;
  batches_trained: number;
  batches_evaluated: number;
  rewinds: number;
  digests_recomputed: number;
  gaps: string[];
  environments?: string[];
  notes: string[];
}

export interface BackupMade {
  directory: string;
  num_jobs: number;
  num_bytes: number;
  has_redis: boolean;
}

export interface BatchDead {
  type: ("batch_dead");
  at_s: number;
  batch_id: string;
  reason: string;
}

export interface BatchTimings {
  generation_started_s: number;
  generation_ended_s: number;
  scoring_started_s: number;
  scoring_ended_s: number;
}

export interface ChatSpec {
  system_prompt: string;
  chat_template_kwargs?: Record<string, (number | boolean | string)>;
}

export interface CheckpointWritten {
  type: ("checkpoint_written");
  at_s: number;
  iteration: number;
  directory: string;
  weights_digest: string;
}

export interface ClockEntry {
  name: string;
  kind: TaskKind;
  interval_s: number;
  phase_s: number;
  last_s: number;
  done_s: number;
  next_s: number;
  last_task: string;
  known_s: number;
}

export interface ClockReport {
  entries: ClockEntry[];
  holder: string;
  lease_s: number;
}

export interface Column {
  name: string;
  type: ("float32" | "float64" | "int32" | "text");
  per: ("completion_token" | "prompt_token" | "rollout" | "token");
  width?: number;
}

export interface CompletionView {
  sample: number;
  text: string;
  reward: number;
  reward_breakdown: Record<string, number>;
  unscorable: Record<string, (("bad_pattern" | "bad_reference" | "crashed" | "not_finite" | "raised" | "timeout" | "too_complex" | "unknown_entry_point") | ("invalid_reply" | "oversize" | "rewritten") | ("no_answer" | "not_finite" | "out_of_range" | "refused" | "too_long"))>;
  advantage: (number | null);
  finish_reason: ("length" | "stop");
  pieces: string[];
  sampled: boolean[];
  generator_logprobs: (number | null)[];
  trainer_logprobs: (number | null)[];
  turns: (TurnView[] | null);
  stop: (("done" | "failed" | "max_tokens" | "max_turns" | "truncated") | null);
  environment_metrics: Record<string, number>;
  columns: Record<string, (number | string | (number | null)[])>;
}

export interface ConsumerSeen {
  worker_id: string;
  seen_s: number;
  services: ServiceSeen[];
  leaves_alone: Record<string, string>;
  lives_s: number;
  job_id: string;
  lacks?: string[];
  offers?: Record<string, string[]>;
}

export interface CurriculumSpec {
  column: string;
  iterations: number;
  begins_with: number;
}

export interface DeadLetter {
  entry_id: string;
  at_s: number;
  batch_id: string;
  iteration: number;
  reason: string;
  attempts: number;
  prompts: DeadPrompt[];
  can_retry: boolean;
  why_not: string;
}

export interface DeadLetters {
  letters: DeadLetter[];
}

export interface DeadPrompt {
  prompt_id: string;
  text: string;
}

export interface DeltaWeights {
  transport: ("delta");
  snapshot_every_versions: number;
}

export interface DifficultyPools {
  easy_threshold: number;
  hard_threshold: number;
  easy_fraction: number;
  hard_fraction: number;
  pass_reward: number;
  newest_weight: number;
}

export interface DiskSeen {
  free_bytes: number;
  size_bytes: number;
  jobs_bytes: number;
}

export interface DrawnPrompts {
  source: string;
  num_prompts: number;
  num_easy: number;
  num_hard: number;
  places: number[];
  passed: number[];
}

export interface EnvironmentDataset {
  type: ("environment");
  difficulty_pools?: DifficultyPools;
  num_train_prompts: number;
}

export interface EnvironmentSpec {
  name: string;
  file: string;
  source: string;
  params: Record<string, (number | boolean | string)>;
  max_turns: number;
  max_tokens: number;
  max_context_tokens?: number;
  renderer: ("chat" | "text");
  chat_format: string;
  step_timeout_s: number;
  request_timeout_s: number;
  max_attempts: number;
  on_failure: (("fail") | number);
}

export interface EvaluationFinished {
  type: ("evaluation_finished");
  at_s: number;
  score: EvaluationScore;
}

export interface EvaluationList {
  evaluations: EvaluationScore[];
}

export interface EvaluationScore {
  iteration: number;
  policy_version: number;
  sampled: number;
  greedy: (number | null);
  num_prompts: number;
  sampled_error?: number;
  pass_at?: PassAt[];
  by_source?: Record<string, number>;
  sets?: Record<string, SetScore>;
}

export interface EvaluationSet {
  num_prompts: number;
  prompts_per_batch: number;
  greedy: boolean;
  group_size?: number;
  sampling?: SamplingParams;
  pass_reward?: number;
  name: string;
  dataset: (AdditionDataset | ReasoningGymDataset | JsonlDataset | HuggingFaceDataset | PluginDataset | EnvironmentDataset);
}

export interface EvaluationSpec {
  num_prompts: number;
  prompts_per_batch: number;
  greedy: boolean;
  group_size?: number;
  sampling?: SamplingParams;
  pass_reward?: number;
  every_iterations: number;
  stop_when?: StopSpec;
  sets?: EvaluationSet[];
  best?: string;
}

export interface ExactReward {
  type: ("exact");
  weight: number;
  on_unscorable: (("fail") | number);
  sources?: string[];
  ignore_case: boolean;
}

export interface ExportRequest {
  version: (number | null);
  best: boolean;
  adapters: boolean;
}

export interface ExportedFiles {
  policy_version: number;
  weights_digest: string;
  files_digest: string;
  adapters_digest: string;
  source: string;
  base: string;
  files: Record<string, number>;
  num_bytes: number;
  has_chain: boolean;
  until_s: number;
  host: string;
}

export interface ExternalStage {
  type: ("external");
  max_attempts: number;
  lease_s: number;
  name: string;
  inputs: string[];
  outputs: Column[];
  unit: ("batch" | "group" | "row");
  reward_column: string;
  weight: number;
}

export type Fault = ("job" | "stack");

export interface FileWeights {
  transport: ("file");
}

export interface ForkSpec {
  job: string;
  version: number;
  weights_digest?: string;
}

export interface ForkedFrom {
  job_id: string;
  policy_version: number;
  weights_digest: string;
  state_digest: string;
  link: string;
}

export interface FormatReward {
  type: ("format");
  weight: number;
  on_unscorable: (("fail") | number);
  sources?: string[];
  pattern: string;
}

export interface FoundText {
  batch_id: string;
  group: number;
  sample: number;
  excerpt: string;
}

export interface FoundTexts {
  texts: FoundText[];
  searched_iterations: number;
  is_complete: boolean;
}

export interface GeneratorList {
  generators: GeneratorSeen[];
}

export interface GeneratorSeen {
  worker_id: string;
  seen_s: number;
  services: ServiceSeen[];
  leaves_alone: Record<string, string>;
  doing: string;
  model: string;
  policy_version: (number | null);
  weights_digest: string;
  tokens_per_s: number;
  batches: string[];
  loading_weights: string[];
  rejected_weights: string;
  unfit_weights: string;
  awake_for: string;
  engine: string;
  wrong_engine: string[];
  not_reproducible: string;
  no_kept_sets: string;
  no_routes: string;
}

export interface GeneratorsChanged {
  type: ("generators_changed");
  at_s: number;
  came: string[];
  gone: string[];
  num_live: number;
}

export interface GroupView {
  prompt_id: string;
  prompt_index: number;
  prompt_text: string;
  reference: string;
  num_resamples: number;
  completions: CompletionView[];
}

export interface HealthChanged {
  type: ("health_changed");
  at_s: number;
  iteration: number;
  problems: HealthProblem[];
}

export interface HealthProblem {
  rule: string;
  since: number;
  problem: string;
  cure: string;
  until?: number;
}

export interface HostsSpec {
  least: number;
  most: number;
  ranks: number;
  wait_s: number;
  regroup_s: number;
}

export interface HuggingFaceDataset {
  type: ("huggingface");
  difficulty_pools?: DifficultyPools;
  train_path: string;
  evaluation_path: string;
  chat: (ChatSpec | null);
  columns?: RowColumns;
  prompt_template?: string;
  metadata_columns?: string[];
  curriculum?: CurriculumSpec;
  file_digests?: Record<string, string>;
  path?: string;
  config?: string;
  split?: string;
  evaluation_split?: string;
}

export interface IterationCommitted {
  type: ("iteration_committed");
  at_s: number;
  metrics: IterationMetrics;
  weights_digest: string;
}

export interface IterationList {
  iterations: IterationMetrics[];
}

export interface IterationMetrics {
  iteration: number;
  policy_version: number;
  trainer_epoch: number;
  num_batches: number;
  num_completions: number;
  num_tokens: number;
  reward_mean: number;
  reward_std: number;
  reward_components: Record<string, number>;
  source_rewards?: Record<string, number>;
  difficulty_pools?: Record<string, number>;
  zero_advantage_share: number;
  num_resamples: number;
  advantage_mean: number;
  advantage_std: number;
  advantage_max: number;
  response_tokens_mean: number;
  response_tokens_max: number;
  truncated_share: number;
  num_unscorable: number;
  loss: number;
  loss_metrics: Record<string, number>;
  entropy: number;
  grad_norm: number;
  learning_rate: number;
  mismatch_k3: number;
  mismatch_max: number;
  effective_sample_share: number;
  effective_sequence_share?: number;
  lag_counts: number[];
  lag_mean: number;
  started_s: number;
  wall_s: number;
  generation_s: number;
  training_s: number;
  waiting_s: number;
  step_s: number;
  publish_s: number;
  bubble_s: number;
  tokens_per_s: number;
  trained_tokens: number;
  trained_tokens_per_s: number;
  mfu: (number | null);
  updates: UpdateMetrics[];
  trajectories?: TrajectoryMetrics;
}

export interface IterationTimes {
  iteration: number;
  started_s: number;
  ended_s: number;
}

export interface IterationView {
  iteration: number;
  batches: RecordedSummary[];
  num_left_out: number;
}

export interface JobList {
  jobs: JobStatus[];
}

export interface JobSpec {
  name: string;
  tags: string[];
  iterations: number;
  model: ModelSpec;
  fork?: ForkSpec;
  dataset: (AdditionDataset | ReasoningGymDataset | JsonlDataset | HuggingFaceDataset | PluginDataset | EnvironmentDataset | MixtureDataset);
  reward?: RewardSpec;
  environment: (EnvironmentSpec | null);
  seed: number;
  schedule: ("bounded" | "colocated" | "delayed" | "periodic" | "synchronous");
  max_policy_lag: number;
  deterministic: boolean;
  rollout?: RolloutSpec;
  algorithm?: AlgorithmSpec;
  trackers: (("mlflow" | "tensorboard" | "wandb") | PluginTracker)[];
  optimizer?: OptimizerSpec;
  trainer?: TrainerSpec;
  weights?: (FileWeights | DeltaWeights | RedisWeights | ObjectWeights);
  stages: (ReferenceStage | TeacherStage | RewardModelStage | LlmJudgeStage | ExternalStage)[];
  evaluation?: EvaluationSpec;
  recording?: (RecordingSpec | null);
  timeouts?: TimeoutSpec;
  limits?: LimitSpec;
}

export type JobState = ("cancelled" | "cancelling" | "failed" | "queued" | "running" | "succeeded");

export interface JobStatus {
  job_id: string;
  max_policy_lag: number;
  window: WindowIteration[];
  policy_version: number;
  weights_digest: string;
  trainer_epoch: number;
  batches_expected: number;
  batches_published: number;
  batches_accepted: number;
  batches_rejected: Record<string, number>;
  batches_reclaimed: number;
  leases_lost: number;
  batches_hedged: number;
  hedges_won: number;
  batches_dead: number;
  name: string;
  state: JobState;
  reason: string;
  schedule: string;
  iterations: number;
  iterations_committed: number;
  created_s: number;
  started_s: number;
  ended_s: number;
  run_directory: string;
  stack_directory: string;
  live_generators: number;
  evaluation_before: (EvaluationScore | null);
  evaluation_latest: (EvaluationScore | null);
  health: HealthProblem[];
  health_past: HealthProblem[];
  disk_bytes: (number | null);
  tags: string[];
  owner: string;
  learns_given: boolean;
  fault?: Fault;
}

export interface JobStory {
  after: string;
  events: ToldEvent[];
  iterations: number[];
  columns: Record<string, (number | null)[]>;
  thinned: boolean;
}

export interface JsonlDataset {
  type: ("jsonl");
  difficulty_pools?: DifficultyPools;
  train_path: string;
  evaluation_path: string;
  chat: (ChatSpec | null);
  columns?: RowColumns;
  prompt_template?: string;
  metadata_columns?: string[];
  curriculum?: CurriculumSpec;
  file_digests?: Record<string, string>;
}

export interface Lane {
  who: string;
  kind: ("generator" | "rank" | "stage");
  busy_s: number;
  idle_share: number;
}

export interface LengthReward {
  type: ("length");
  weight: number;
  on_unscorable: (("fail") | number);
  sources?: string[];
  target_chars: number;
  max_chars: number;
}

export interface LimitSpec {
  max_batch_bytes: number;
  max_waiting_rows: number;
}

export interface LlmJudgeStage {
  type: ("llm_judge");
  max_attempts: number;
  lease_s: number;
  weight: number;
  on_failure: (("fail") | number);
  name: string;
  model: string;
  prompt: string;
  system?: string;
  answer: string;
  criteria?: Record<string, number>;
  lowest: number;
  highest: number;
}

export interface LogPart {
  text: string;
  after: number;
  next: number;
  size: number;
}

export interface LoraSpec {
  rank: number;
  alpha: number;
  target_modules: string[];
  publish: ("adapter" | "merged");
}

export interface MathVerifyReward {
  type: ("math_verify");
  weight: number;
  on_unscorable: (("fail") | number);
  sources?: string[];
}

export interface MemoryMeasured {
  type: ("memory_measured");
  at_s: number;
  device: string;
  num_tokens: number;
  peak_bytes: number;
  usable_bytes: number;
}

export interface MismatchAlarm {
  type: ("mismatch_alarm");
  at_s: number;
  iteration: number;
  mismatch_k3: number;
  mismatch_max: number;
  effective_sample_share: number;
  threshold: number;
}

export interface MixtureDataset {
  type: ("mixture");
  sources: MixtureSource[];
}

export interface MixtureSource {
  name: string;
  weight: number;
  dataset: (AdditionDataset | ReasoningGymDataset | JsonlDataset | HuggingFaceDataset | PluginDataset | EnvironmentDataset);
  environment?: EnvironmentSpec;
}

export interface ModelSpec {
  path: string;
  dtype: ("bfloat16" | "float32");
  cast_lm_head_to_fp32?: boolean;
  matmul?: ("onednn" | "torch");
  file_digests?: Record<string, string>;
}

export interface NumericReward {
  type: ("numeric");
  weight: number;
  on_unscorable: (("fail") | number);
  sources?: string[];
  tolerance: number;
}

export interface ObjectWeights {
  transport: ("object");
  snapshot_every_versions: number;
}

export interface OptimizerSpec {
  type: ("adamw" | "adamw_8bit" | "muon");
  groups?: ParameterGroup[];
  learning_rate: number;
  critic_learning_rate_factor?: number;
  beta1: number;
  beta2: number;
  epsilon: number;
  weight_decay: number;
  max_grad_norm: number;
  offload?: ("disk" | "host");
  schedule: ("constant" | "cosine" | "linear" | "wsd");
  warmup_iterations: number;
  decay_iterations?: number;
  min_learning_rate?: number;
}

export interface OverlongReward {
  type: ("overlong");
  weight: number;
  on_unscorable: (("fail") | number);
  sources?: string[];
  max_tokens: number;
  buffer_tokens: number;
}

export interface ParameterGroup {
  parameters: string[];
  learning_rate_factor: number;
  weight_decay?: number;
}

export interface PassAt {
  k: number;
  share: number;
  error: number;
}

export interface PluginDataset {
  type: ("plugin");
  difficulty_pools?: DifficultyPools;
  entry_point: string;
  params: Record<string, (number | boolean | string)>;
  chat: (ChatSpec | null);
}

export interface PluginLoss {
  type?: ("plugin");
  entry_point: string;
}

export interface PluginReward {
  type: ("plugin");
  weight: number;
  on_unscorable: (("fail") | number);
  sources?: string[];
  entry_point: string;
  file: string;
  source: string;
  arguments?: string[];
  package?: string;
}

export interface PluginTracker {
  type?: ("plugin");
  entry_point: string;
}

export interface ProbeSpec {
  rows?: number;
  tokens: number;
  max_gap?: number;
}

export interface ProbedVersion {
  rows: string;
  logprobs: string;
}

export interface ProblemDetails {
  type: string;
  title: string;
  status: number;
  detail: string;
  field: (string | null);
  cure: (string | null);
  refusals?: Refusal[];
}

export interface PromptLease {
  batch_id: string;
  generator_id: string;
  idle_s: number;
  deliveries: number;
}

export interface QueueList {
  queues: QueueSeen[];
}

export interface QueueSeen {
  queue: string;
  waiting: number;
  running: number;
  oldest_s: number;
  workers: number;
}

export interface ReasoningGymDataset {
  type: ("reasoning_gym");
  difficulty_pools?: DifficultyPools;
  task: string;
  params: Record<string, (number | boolean | string)>;
  num_train_prompts: number;
  question_suffix: string;
  chat: (ChatSpec | null);
}

export interface ReasoningGymReward {
  type: ("reasoning_gym");
  weight: number;
  on_unscorable: (("fail") | number);
  sources?: string[];
  strict: boolean;
  answer_pattern: string;
}

export interface RecordedBatchView {
  job_id: string;
  batch_id: string;
  iteration: number;
  purpose: ("evaluation" | "train");
  policy_version: number;
  weights_digest: string;
  generator_id: string;
  attempt: number;
  batch_digest: string;
  timings: BatchTimings;
  groups: GroupView[];
  can_sample_again: boolean;
  why_not: string;
}

export interface RecordedList {
  recording: (RecordingSpec | null);
  bytes: number;
  iterations: IterationView[];
  damaged: string[];
}

export interface RecordedSummary {
  batch_id: string;
  purpose: ("evaluation" | "train");
  index: number;
  policy_version: number;
  weights_digest: string;
  generator_id: string;
  num_groups: number;
  num_completions: number;
  reward_mean: number;
  batch_digest: string;
}

export interface RecordingSpec {
  share: number;
  evaluations: boolean;
  keep_iterations: number;
  max_bytes: number;
  max_version_bytes: number;
}

export interface RedisKeys {
  name: string;
  type: string;
  pattern: string;
}

export interface RedisSeen {
  version: string;
  uptime_s: number;
  used_bytes: number;
  max_bytes: number;
  is_on_disk: boolean;
  num_clients: number;
  num_jobs: number;
  max_jobs: number;
}

export interface RedisWeights {
  transport: ("redis");
}

export interface ReferenceStage {
  type: ("reference");
  max_attempts: number;
  lease_s: number;
  name: string;
}

export interface Refusal {
  field: string;
  problem: string;
  cure: string;
}

export interface RegexReward {
  type: ("regex");
  weight: number;
  on_unscorable: (("fail") | number);
  sources?: string[];
  pattern: string;
  compare?: ("number" | "text");
}

export interface ResumeRequest {
  iterations: (number | null);
  on_unscorable: Record<string, (("fail") | number)>;
  on_failure: Record<string, (("fail") | number)>;
  wider_sums?: number;
}

export interface RewardModelStage {
  type: ("reward_model");
  max_attempts: number;
  lease_s: number;
  weight: number;
  on_failure: (("fail") | number);
  name: string;
  model: string;
  truncate: ("completion_end" | "never" | "prompt_start");
  file_digests?: Record<string, string>;
}

export interface RewardSpec {
  components: (ExactReward | NumericReward | RegexReward | FormatReward | LengthReward | OverlongReward | ReasoningGymReward | MathVerifyReward | PluginReward)[];
  item_timeout_s: number;
  request_timeout_s: number;
  max_attempts: number;
}

export interface Rewound {
  type: ("rewound");
  at_s: number;
  iteration: number;
  committed: number;
  trainer_epoch: number;
}

export interface RolloutSpec {
  batches_per_iteration: number;
  prompts_per_batch: number;
  group_size: number;
  sampling?: SamplingParams;
  max_prompt_tokens: number;
  filter_overlong_prompts?: boolean;
  max_resamples: number;
  max_attempts: number;
  on_failed_batch: ("abandon" | "fail");
  hedge: boolean;
  probe?: ProbeSpec;
}

export interface RowColumns {
  prompt: string;
  messages: string;
  reference: string;
  reference_after?: string;
  completion: string;
  task_entry: string;
}

export interface SampledBy {
  policy_version: number;
  weights_digest: string;
  batches: string[];
}

export interface SamplingParams {
  max_new_tokens: number;
  temperature: number;
  top_p: number;
  top_k: number;
  min_p?: number;
  min_new_tokens?: number;
  logit_bias?: Record<string, number>;
  repetition_penalty?: number;
  stop_token_ids?: number[];
  stop?: string[];
}

export interface ServiceSeen {
  name: string;
  away_s: (number | null);
  why: string;
  answered_s: (number | null);
  tries_again?: Record<string, string>;
}

export interface SetScore {
  sampled: number;
  greedy: (number | null);
  num_prompts: number;
  sampled_error?: number;
  pass_at?: PassAt[];
}

export interface SpecCheck {
  valid: boolean;
}

export interface SpecFiles {
  models: string[];
  rows: string[];
  datasets: string[];
  is_complete: boolean;
}

export interface StackReport {
  redis: RedisSeen;
  disk: DiskSeen;
  num_queued: number;
  consumers: ConsumerSeen[];
  trainers: TrainerSeen[];
  generators: GeneratorSeen[];
  stage_workers: StageWorkerSeen[];
  task_workers: TaskWorkerSeen[];
}

export interface StackState {
  redis_used_bytes: number;
  redis_max_bytes: number;
  live_generators: number;
  live_stage_workers: number;
  live_consumers: number;
  live_task_workers: number;
  num_jobs: number;
  max_jobs: number;
}

export interface StageLease {
  stage: string;
  batch_id: string;
  item: number;
  worker_id: string;
  attempt: number;
  age_s: number;
  lease_s: number;
}

export interface StageState {
  stage: string;
  num_free: number;
  num_leased: number;
  oldest_age_s: (number | null);
  num_workers: number;
  rows_made: number;
  items_failed: number;
  items_reclaimed: number;
}

export interface StageWorkerSeen {
  worker_id: string;
  seen_s: number;
  services: ServiceSeen[];
  leaves_alone: Record<string, string>;
  serves: string[];
  stages: string[];
  items: string[];
}

export interface StateChanged {
  type: ("state_changed");
  at_s: number;
  state: JobState;
  reason: string;
  by?: string;
  changes?: string[];
}

export interface StopSpec {
  held_out?: number;
  patience?: number;
}

export interface StreamReport {
  job_id: string;
  max_policy_lag: number;
  window: WindowIteration[];
  policy_version: number;
  weights_digest: string;
  trainer_epoch: number;
  batches_expected: number;
  batches_published: number;
  batches_accepted: number;
  batches_rejected: Record<string, number>;
  batches_reclaimed: number;
  leases_lost: number;
  batches_hedged: number;
  hedges_won: number;
  batches_dead: number;
  fence_state: string;
  iteration: number;
  trainer_lease_s: (number | null);
  accepted_bytes: number;
  batches_failed: number;
  batches_redispatched: number;
  rewinds: number;
  versions_proved: number;
  proofs_far: number;
  proofs_stale: number;
  proofs_not_finite: number;
  proofs_untold: number;
  streams: StreamState[];
  redis_keys: RedisKeys[];
  leases: PromptLease[];
  generators: GeneratorSeen[];
  rows_waiting?: number;
  columns_bytes?: number;
  stages?: StageState[];
  stage_leases?: StageLease[];
  stage_workers?: StageWorkerSeen[];
}

export interface StreamState {
  name: string;
  num_entries: number;
  num_pending: number;
  num_waiting: number;
  oldest_age_s: (number | null);
  memory_bytes: number;
}

export interface TaskArguments {
  job_id: string;
  version: (number | null);
  best: boolean;
  adapters: boolean;
}

export interface TaskChanged {
  type: ("task_changed");
  at_s: number;
  task_id: string;
  kind: TaskKind;
  state: TaskState;
  by: string;
  reason: string;
}

export type TaskKind = ("backup" | "clear_objects" | "delete" | "export" | "forget" | "remove_files" | "verify" | "verify_kept");

export interface TaskList {
  tasks: TaskStatus[];
}

export interface TaskProgress {
  files_done: number;
  files_total: number;
  bytes_done: number;
  bytes_total: number;
}

export interface TaskResult {
  verdict?: AuditVerdict;
  exported?: ExportedFiles;
  backup?: BackupMade;
  num_jobs?: number;
  num_bytes?: number;
}

export type TaskState = ("cancelled" | "done" | "failed" | "queued" | "running");

export interface TaskStatus {
  task_id: string;
  kind: TaskKind;
  queue: string;
  state: TaskState;
  reason: string;
  arguments?: TaskArguments;
  who: string;
  created_s: number;
  started_s: number;
  ended_s: number;
  attempts: number;
  worker: string;
  is_cancelling: boolean;
  progress?: TaskProgress;
  result: (TaskResult | null);
}

export interface TaskWorkerSeen {
  worker_id: string;
  seen_s: number;
  services: ServiceSeen[];
  leaves_alone: Record<string, string>;
  host: string;
  queues: string[];
  running: string[];
}

export interface TeacherStage {
  type: ("teacher");
  max_attempts: number;
  lease_s: number;
  model?: string;
  models?: Record<string, string>;
  top_k?: number;
  hidden_size?: number;
  file_digests?: Record<string, string>;
  name: string;
}

export interface TimelineReport {
  job_id: string;
  spans: TimelineSpan[];
  lanes: Lane[];
  critical: number[];
  iterations: IterationTimes[];
  words: string;
}

export interface TimelineSpan {
  who: string;
  what: string;
  iteration: number;
  batch_id: string;
  started_s: number;
  ended_s: number;
}

export interface TimeoutSpec {
  generator_lease_s: number;
  trainer_lease_s: number;
  generation_s: number;
  iteration_s: number;
  no_generator_s: number;
  no_stage_worker_s: number;
  dependency_s: number;
  ranks_s: number;
  max_trainer_starts: number;
}

export interface ToldEvent {
  id: string;
  event: (StateChanged | TrainerStarted | MemoryMeasured | IterationCommitted | EvaluationFinished | CheckpointWritten | BatchDead | GeneratorsChanged | HealthChanged | MismatchAlarm | Rewound | TaskChanged);
}

export interface TrainerSeen {
  job_id: string;
  name: string;
  iteration: number;
  lease_s: (number | null);
  reason: string;
}

export interface TrainerSpec {
  world_size: number;
  hosts?: HostsSpec;
  sharding: ("fsdp" | "none");
  accumulation: ("exact" | "float");
  wider_sums?: WiderSums[];
  checkpoint_every_iterations: number;
  keep_checkpoints: number;
  packing: ("as_sampled" | "padded" | "shared_prompt");
  max_tokens_per_micro_batch: number;
  measure_entropy: boolean;
  mismatch_alarm: number;
  on_mismatch: ("fail" | "warn");
  kl_alarm?: number;
  entropy_alarm?: number;
  stop_on?: ("completions_cut" | "completions_unscorable" | "entropy_gone" | "gradient_dead" | "groups_equal" | "kl_high" | "lag_too_large" | "mismatch_high" | "mismatch_unusual" | "reward_collapsed" | "score_collapsed" | "truncations_rising")[];
  gradient_checkpointing: boolean;
  free_gradients?: boolean;
  offload_activations?: boolean;
  lora: (LoraSpec | null);
  external: boolean;
}

export interface TrainerStarted {
  type: ("trainer_started");
  at_s: number;
  trainer_epoch: number;
  next_iteration: number;
  resumed: boolean;
  passes?: string;
}

export interface TrajectoryMetrics {
  turns_mean: number;
  turns_max: number;
  done_share: number;
  max_turns_share: number;
  max_tokens_share: number;
  failed_share: number;
  observation_tokens_mean: number;
  lines_mean: number;
  environment_reward_mean: number;
  num_begun_again: number;
  environment: Record<string, number>;
}

export interface TurnView {
  start: number;
  end: number;
  finish_reason: ("length" | "stop");
  reward: number;
  advantage: (number | null);
  begins_anew: boolean;
}

export interface UpdateMetrics {
  loss: number;
  grad_norm: number;
  loss_metrics: Record<string, number>;
}

export interface WiderSums {
  first_iteration: number;
  bits: number;
}

export interface WindowIteration {
  iteration: number;
  oldest_version: number;
  newest_version: number;
  batches_expected: number;
  batches_published: number;
  batches_dead: number;
}
