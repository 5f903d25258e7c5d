"""CleanRL's PPO: rollouts in preallocated tensors, numpy minibatch indices, several epochs over each rollout."""

import numpy as np
import torch
import torch.nn as nn
from torch.distributions import Normal

np.random.seed(1)
torch.manual_seed(1)
num_envs, num_steps, updates, minibatch = 4, 16, 6, 16


class Envs:
    def __init__(self):
        self.x = np.random.randn(num_envs, 2)

    def step(self, action):
        self.x = 0.9 * self.x + 0.3 * action + 0.05 * np.random.randn(num_envs, 2)
        return self.x, -np.abs(self.x - 1).sum(1)


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
        self.actor_mean = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
        self.actor_logstd = nn.Parameter(torch.zeros(1, 2))

    def get_action_and_value(self, x, action=None):
        mean = self.actor_mean(x)
        probs = Normal(mean, self.actor_logstd.expand_as(mean).exp())
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action).sum(1), probs.entropy().sum(1), self.critic(x)


envs, agent = Envs(), Agent()
optimizer = torch.optim.Adam(agent.parameters(), lr=3e-3, eps=1e-5)
obs = torch.zeros((num_steps, num_envs, 2))
actions = torch.zeros((num_steps, num_envs, 2))
logprobs = torch.zeros((num_steps, num_envs))
rewards = torch.zeros((num_steps, num_envs))
values = torch.zeros((num_steps, num_envs))
next_obs = torch.Tensor(envs.x)
for update in range(1, updates + 1):
    optimizer.param_groups[0]["lr"] = (1.0 - (update - 1.0) / updates) * 3e-3
    for step in range(num_steps):
        obs[step] = next_obs
        with torch.no_grad():
            action, logprob, _, value = agent.get_action_and_value(next_obs)
            values[step] = value.flatten()
        actions[step] = action
        logprobs[step] = logprob
        x, reward = envs.step(action.cpu().numpy())
        rewards[step] = torch.tensor(reward)
        next_obs = torch.Tensor(x)
    with torch.no_grad():
        next_value = agent.critic(next_obs).reshape(1, -1)
        advantages = torch.zeros_like(rewards)
        lastgaelam = 0
        for t in reversed(range(num_steps)):
            nextvalues = next_value if t == num_steps - 1 else values[t + 1]
            delta = rewards[t] + 0.99 * nextvalues - values[t]
            advantages[t] = lastgaelam = delta + 0.99 * 0.95 * lastgaelam
        returns = advantages + values
    b_obs, b_actions = obs.reshape(-1, 2), actions.reshape(-1, 2)
    b_logprobs, b_advantages, b_returns = logprobs.reshape(-1), advantages.reshape(-1), returns.reshape(-1)
    b_inds = np.arange(num_envs * num_steps)
    clipfracs = []
    for epoch in range(3):
        np.random.shuffle(b_inds)
        for start in range(0, len(b_inds), minibatch):
            mb_inds = b_inds[start : start + minibatch]
            _, newlogprob, entropy, newvalue = agent.get_action_and_value(b_obs[mb_inds], b_actions[mb_inds])
            ratio = (newlogprob - b_logprobs[mb_inds]).exp()
            clipfracs += [((ratio - 1.0).abs() > 0.2).float().mean().item()]
            mb_adv = b_advantages[mb_inds]
            mb_adv = (mb_adv - mb_adv.mean()) / (mb_adv.std() + 1e-8)
            pg_loss = torch.max(-mb_adv * ratio, -mb_adv * torch.clamp(ratio, 0.8, 1.2)).mean()
            v_loss = 0.5 * ((newvalue.view(-1) - b_returns[mb_inds]) ** 2).mean()
            loss = pg_loss - 0.01 * entropy.mean() + v_loss * 0.5
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
    y_pred, y_true = values.reshape(-1).numpy(), b_returns.numpy()
    explained = 1 - np.var(y_true - y_pred) / np.var(y_true)
    print(
        f"update {update} reward {rewards.mean().item():.5f} v {v_loss.item():.5f} "
        f"clip {np.mean(clipfracs):.4f} ev {explained:.4f}"
    )
