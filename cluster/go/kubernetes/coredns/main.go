// Command coredns is CoreDNS with the plugins that a cluster's own zone needs.
//
// The stock main package links every plugin, cloud SDKs included, which costs
// more build time than all the rest of this cluster's DNS.
package main

import (
	"github.com/coredns/coredns/core/dnsserver"
	"github.com/coredns/coredns/coremain"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/health"
	_ "github.com/coredns/coredns/plugin/kubernetes"
	_ "github.com/coredns/coredns/plugin/loadbalance"
	_ "github.com/coredns/coredns/plugin/ready"
)

// Plugins run in this order, whatever the order in the Corefile.
func init() {
	dnsserver.Directives = []string{"health", "ready", "errors", "loadbalance", "kubernetes"}
}

func main() {
	coremain.Run()
}
